package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"gatewayd/internal/api"
)

// UserPath is the path of a user, or of something below it.
func UserPath(name string, below ...string) string {
	return strings.Join(append([]string{"/v1/users/" + url.PathEscape(name)}, below...), "/")
}

// DevicePath is the path of who a device is promoted to.
func DevicePath(device string) string { return "/v1/devices/" + url.PathEscape(device) + "/user" }

// Change makes a call with a JSON body, none for nil, and returns the body of the answer.
func (c *Client) Change(ctx context.Context, method, path string, body any) ([]byte, error) {
	q := Request{Method: method, Path: path}
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("request %s: %w", path, err)
		}
		kind := "application/json"
		if method == http.MethodPatch {
			kind = "application/merge-patch+json"
		}
		q.Body, q.Header = text, http.Header{"Content-Type": {kind}}
	}
	answer, _, err := c.Bytes(ctx, q)
	return answer, err
}

// User is one user; one that does not exist is a Problem with status 404.
func (c *Client) User(ctx context.Context, name string) (out api.User, err error) {
	return out, c.Get(ctx, UserPath(name), nil, &out)
}

// Users are users by name; query has limit and after.
func (c *Client) Users(ctx context.Context, query url.Values) (out api.UserList, err error) {
	return out, c.Get(ctx, "/v1/users", query, &out)
}
