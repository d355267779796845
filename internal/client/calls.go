package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"gatewayd/internal/api"
)

// Connections are the live flows that the selector picks; an empty one picks all.
func (c *Client) Connections(ctx context.Context, selector url.Values) (out api.Connections, err error) {
	return out, c.Get(ctx, "/v1/connections", selector, &out)
}

// Flow is one live flow.
func (c *Client) Flow(ctx context.Context, id uint64) (out api.Flow, err error) {
	return out, c.Get(ctx, flowPath(id), nil, &out)
}

// ClosedFlows are the last closed flows that the selector picks.
func (c *Client) ClosedFlows(ctx context.Context, selector url.Values) (out api.ClosedFlows, err error) {
	return out, c.Get(ctx, "/v1/connections/closed", selector, &out)
}

// Kill ends one flow. A flow that is not live is a Problem with status 404.
func (c *Client) Kill(ctx context.Context, id uint64) error {
	_, _, err := c.Bytes(ctx, Request{Method: http.MethodDelete, Path: flowPath(id)})
	return err
}

// KillWhere ends every flow that the selector picks, all for an empty one, and
// tells how many it ended.
func (c *Client) KillWhere(ctx context.Context, selector url.Values) (int, error) {
	var out api.Closed
	err := c.call(ctx, Request{Method: http.MethodDelete, Path: "/v1/connections", Query: selector}, &out)
	return out.Closed, err
}

// Status is how the gateway fares.
func (c *Client) Status(ctx context.Context) (out api.Status, err error) {
	return out, c.Get(ctx, "/v1/status", nil, &out)
}

// Config is the running configuration's text and its etag, quoted as If-Match wants it.
func (c *Client) Config(ctx context.Context) (text, etag string, err error) {
	body, header, err := c.Bytes(ctx, Request{Path: "/v1/config"})
	return string(body), header.Get("ETag"), err
}

// Apply makes text the running configuration if etag, quoted, is still the running one's.
func (c *Client) Apply(ctx context.Context, text, etag string) (out api.Applied, err error) {
	header := http.Header{"If-Match": {etag}, "Content-Type": {"application/yaml"}}
	return out, c.call(ctx, Request{Method: http.MethodPost, Path: "/v1/config", Header: header, Body: []byte(text)}, &out)
}

// Check tells what applying text would refuse.
func (c *Client) Check(ctx context.Context, text string) error {
	header := http.Header{"Content-Type": {"application/yaml"}}
	_, _, err := c.Bytes(ctx, Request{Method: http.MethodPost, Path: "/v1/config/check", Header: header, Body: []byte(text)})
	return err
}

// Reload makes the gateway read its configuration file again.
func (c *Client) Reload(ctx context.Context) (out api.Applied, err error) {
	return out, c.call(ctx, Request{Method: http.MethodPost, Path: "/v1/config/reload"}, &out)
}

func flowPath(id uint64) string { return "/v1/connections/" + strconv.FormatUint(id, 10) }
