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

	json2 "github.com/go-json-experiment/json"
)

// Client asks the process that serves an admin socket. Its methods wait for the answer until their context is done.
// The process may hang, so a caller that does not follow a stream sets a deadline.
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

// Statuses returns the status of the process, and of the other replicas.
func (c *Client) Statuses(ctx context.Context) (*StatusList, error) {
	list := new(StatusList)
	return list, c.Call(ctx, http.MethodGet, "/v1/statuses", nil, list)
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

// Forget removes a missing node from the inventories of all replicas. had reports whether an inventory had the node.
func (c *Client) Forget(ctx context.Context, node string) (had bool, err error) {
	var gone Forgotten
	err = c.Call(ctx, http.MethodDelete, "/v1/nodes/"+url.PathEscape(node), nil, &gone)
	return gone.Had, err
}

// Call sends a request with body as JSON (nil: no body), and decodes the answer into v. Its errors tell an operator
// what to do about the socket. A refusal is a *[Failure].
func (c *Client) Call(ctx context.Context, method, path string, body, v any) error {
	return c.explained(call(ctx, c.http, method, path, body, v))
}

// socketError is an error whose text tells an operator what to do. It replaces the text of its cause.
type socketError struct {
	text  string
	cause error
}

func (e *socketError) Error() string { return e.text }
func (e *socketError) Unwrap() error { return e.cause }

// explained returns err. If err is about the admin socket, the returned error says what to do.
func (c *Client) explained(err error) error {
	switch {
	case NotRunning(err):
		return &socketError{fmt.Sprintf("nothing listens on %s: is it running? After a change of the key socket, name the "+
			"old one with --socket", c.path), err}
	case errors.Is(err, context.DeadlineExceeded):
		return &socketError{fmt.Sprintf("the process does not answer on %s in time, but may still do what it was asked: "+
			"see its log, or restart it, such as with systemctl restart tunnel-cloud or tunnel-edge", c.path), err}
	case errors.Is(err, fs.ErrPermission):
		return &socketError{fmt.Sprintf("%s may not be used by this user: run this as the user of the daemon, such as with "+
			"sudo", c.path), err}
	}
	return err
}

// NotRunning reports whether an error of a Client says that no process serves the socket.
func NotRunning(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}

// Get returns the answer to a GET request for a path whose answers are not JSON, such as /metrics. It accepts the
// status 503, with which /readyz answers while the process is not ready.
func (c *Client) Get(ctx context.Context, path string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://tunnel"+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err == nil && response.StatusCode != http.StatusOK && response.StatusCode != http.StatusServiceUnavailable {
		err = errors.New(response.Status)
	}
	return answer, err
}

// errOldReplica is the error of a replica that has no API.
var errOldReplica = errors.New("it is older than this replica and cannot be asked about its nodes")

// call sends a request with body (nil: none), and decodes the answer into v. An answer other than 2xx is a *Failure.
func call(ctx context.Context, client *http.Client, method, path string, body, v any) error {
	response, err := send(ctx, client, method, path, body)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	err = json2.UnmarshalRead(http.MaxBytesReader(nil, response.Body, maxAnswer), v)
	if long, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return fmt.Errorf("the answer is longer than %d bytes", long.Limit)
	}
	return err
}

// maxFailure bounds the body of an answer that is not 2xx, in bytes.
const maxFailure = 64 << 10

// send sends a request with body (nil: none). An answer other than 2xx is a *Failure; else the caller closes the body.
func send(ctx context.Context, client *http.Client, method, path string, body any) (*http.Response, error) {
	var text io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		text = bytes.NewReader(b)
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://tunnel"+path, text)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(r)
	if err != nil {
		if wrapped, ok := errors.AsType[*url.Error](err); ok {
			err = wrapped.Err // the URL tells an operator nothing
		}
		return nil, err
	}
	if response.StatusCode/100 == 2 {
		return response, nil
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxFailure))
	if err != nil {
		return nil, err
	}
	failure := new(Failure)
	if json.Unmarshal(answer, failure) != nil || failure.Text == "" {
		return nil, errOlder{response.Status}
	}
	return nil, failure
}

// errOlder is the error if the process answers that it does not know the path of a request.
type errOlder struct{ status string }

// Error implements error.
func (e errOlder) Error() string { return e.status + ": the process is older than this command" }
