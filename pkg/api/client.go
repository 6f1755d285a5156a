package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"syscall"
)

// Client asks the process that serves an admin socket.
type Client struct {
	path string
	http *http.Client
}

// NewClient returns a client for the socket at path. It does not connect yet.
func NewClient(path string) *Client {
	return &Client{path, clientOf(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	})}
}

// clientOf returns an HTTP client that takes each connection from dial, for one request.
func clientOf(dial func(ctx context.Context) (net.Conn, error)) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			DisableKeepAlives: true, DisableCompression: true,
		},
	}
}

// Nodes returns every node that any replica knows.
func (c *Client) Nodes(ctx context.Context) (*NodeList, error) {
	list := new(NodeList)
	return list, c.Call(ctx, http.MethodGet, "/v1/nodes", nil, list)
}

// Status returns the status of the process.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	status := new(Status)
	return status, c.Call(ctx, http.MethodGet, "/v1/status", nil, status)
}

// Ping measures the round trip to a node, or to a target behind it. A refusal is a *[Failure].
func (c *Client) Ping(ctx context.Context, node, target string) (*Pinged, error) {
	query := url.Values{"node": {node}}
	if target != "" {
		query.Set("target", target)
	}
	pinged := new(Pinged)
	return pinged, c.Call(ctx, http.MethodPost, "/v1/ping?"+query.Encode(), nil, pinged)
}

// Forget removes a missing node from the inventories. It reports whether one had the node.
func (c *Client) Forget(ctx context.Context, node string) (had bool, err error) {
	var gone Forgotten
	err = c.Call(ctx, http.MethodDelete, "/v1/nodes/"+url.PathEscape(node), nil, &gone)
	return gone.Had, err
}

// Call sends a request with body as JSON (nil: no body), and decodes the answer into v. Its errors tell an operator
// what to do about the socket. A refusal is a *[Failure].
func (c *Client) Call(ctx context.Context, method, path string, body, v any) error {
	err := call(ctx, c.http, method, path, body, v)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nothing listens on %s: is it running? After a change of the key socket, name the old one "+
			"with --socket", c.path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s may not be used by this user: run this as the user of the daemon, such as with sudo", c.path)
	}
	return err
}

// errOldReplica is the error of a replica that has no API.
var errOldReplica = errors.New("it is older than this replica and cannot be asked about its nodes")

// call sends a request with body (nil: none), and decodes the answer into v. An answer other than 2xx is a *Failure.
func call(ctx context.Context, client *http.Client, method, path string, body, v any) error {
	var text io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		text = bytes.NewReader(b)
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://tunnel"+path, text)
	if err != nil {
		return err
	}
	response, err := client.Do(r)
	if err != nil {
		if wrapped, ok := errors.AsType[*url.Error](err); ok {
			err = wrapped.Err // the URL tells an operator nothing
		}
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer+1))
	switch {
	case err != nil:
		return err
	case len(answer) > maxAnswer:
		return fmt.Errorf("the answer is longer than %d bytes", maxAnswer)
	case response.StatusCode/100 == 2:
		return json.Unmarshal(answer, v)
	}
	failure := new(Failure)
	if json.Unmarshal(answer, failure) != nil || failure.Text == "" {
		return fmt.Errorf("%s: the process is older than this command", response.Status)
	}
	return failure
}
