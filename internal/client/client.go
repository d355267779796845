// Package client speaks to a gateway's API: requests, problems, and streams of
// events, over a Unix socket or TCP.
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"gatewayd/internal/api"
)

// Default is where a gateway listens unless its configuration says otherwise.
const Default = "unix:/run/gatewayd/api.sock"

const (
	dialTimeout = 5 * time.Second
	maxProblem  = 1 << 20 // bytes of an error that are read
)

// Options say where the gateway is.
type Options struct {
	API   string      // unix:/path, tcp:host:port, http:// or https:// URL; "" is Default
	Token string      // bearer token; over TCP
	TLS   *tls.Config // for https; nil: the system's authorities
}

// Client speaks to one gateway. It is safe for concurrent use.
type Client struct {
	where string // as the user named it
	base  string
	token string
	http  *http.Client
}

// New reads the address; it connects to nothing.
func New(o Options) (*Client, error) {
	if o.API == "" {
		o.API = Default
	}
	c := &Client{where: o.API, token: o.Token}
	transport := &http.Transport{
		DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext, TLSClientConfig: o.TLS,
		TLSHandshakeTimeout: dialTimeout, MaxIdleConnsPerHost: 4, IdleConnTimeout: 30 * time.Second,
	}
	scheme, rest, _ := strings.Cut(o.API, ":")
	switch {
	case scheme == "unix" && strings.HasPrefix(rest, "/"):
		c.base = "http://gatewayd"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "unix", rest)
		}
	case scheme == "tcp" && rest != "":
		if _, _, err := net.SplitHostPort(rest); err != nil {
			return nil, fmt.Errorf("api %q: want tcp:host:port", o.API)
		}
		c.base = "http://" + rest
	case scheme == "http" || scheme == "https":
		u, err := url.Parse(o.API)
		if err != nil || u.Host == "" {
			return nil, fmt.Errorf("api %q: want %s://host:port", o.API, scheme)
		}
		c.base = scheme + "://" + u.Host + strings.TrimSuffix(u.Path, "/")
	default:
		return nil, fmt.Errorf("api %q: want unix:/path, tcp:host:port, or an http:// or https:// URL", o.API)
	}
	c.http = &http.Client{Transport: transport, CheckRedirect: noRedirect}
	return c, nil
}

// noRedirect keeps the token with the gateway that it is for.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Close gives idle connections up.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Request is one call.
type Request struct {
	Method string // "" is GET
	Path   string // as in the API's table
	Query  url.Values
	Header http.Header
	Body   []byte
}

// Send makes the call and returns the answer, whose body the caller closes. An
// answer that is no success is an *api.Problem; a gateway that does not answer is
// an error that says how to start one.
func (c *Client) Send(ctx context.Context, q Request) (*http.Response, error) {
	method := q.Method
	if method == "" {
		method = http.MethodGet
	}
	address := c.base + q.Path
	if len(q.Query) > 0 {
		address += "?" + q.Query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(q.Body))
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", q.Path, err)
	}
	for key, values := range q.Header {
		req.Header[key] = values
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(ctx, err)
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, problemOf(resp)
	}
	return resp, nil
}

// explain says what to do about a gateway that does not answer.
func (c *Client) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("no permission to use %s: be root or join the group api.socket_group names", c.where)
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return fmt.Errorf("cannot reach gatewayd at %s: is it running? start it with: gatewayd run -c FILE", c.where)
	}
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	return fmt.Errorf("gatewayd at %s: %w", c.where, err)
}

// problemOf reads the problem of an answer; one that is none is described.
func problemOf(resp *http.Response) error {
	p := &api.Problem{}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	if err != nil || json.Unmarshal(body, p) != nil || p.Status == 0 {
		p = &api.Problem{Title: http.StatusText(resp.StatusCode), Status: resp.StatusCode, Detail: "the server at this address answered " + resp.Status}
	}
	return p
}

// Bytes is the whole body of a call.
func (c *Client) Bytes(ctx context.Context, q Request) ([]byte, http.Header, error) {
	resp, err := c.Send(ctx, q)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, nil, c.explain(ctx, err)
	}
	return body, resp.Header, nil
}

// Get reads the JSON at path into v.
func (c *Client) Get(ctx context.Context, path string, query url.Values, v any) error {
	return c.call(ctx, Request{Path: path, Query: query}, v)
}

func (c *Client) call(ctx context.Context, q Request, v any) error {
	body, _, err := c.Bytes(ctx, q)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("answer of %s: %w", q.Path, err)
	}
	return nil
}
