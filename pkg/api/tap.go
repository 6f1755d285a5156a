package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// followPause is how long a follower waits after the stream of a replica has failed. The wait doubles up to
	// maxFollowPause while the replica does not answer.
	followPause    = time.Second
	maxFollowPause = 30 * time.Second
	// maxWatchers is how many operators may watch this replica at a time: half of the conns of the admin socket.
	maxWatchers = 8
	// maxStall is how long a watcher may take to read the lines that were sent: a stopped terminal reads nothing.
	maxStall = time.Minute
	// maxLine is the longest line of another process, in bytes.
	maxLine = 64 << 10
)

// errWatchers refuses a watcher if maxWatchers watch already.
var errWatchers = fmt.Errorf("%d operators watch this replica already: end one tunnel tap, and try again", maxWatchers)

// tapOperator answers GET /v1/tap on the admin socket. It serves at most maxWatchers at a time, so that other commands
// can still connect to the socket. The other replicas also follow this one, each for at most maxWatchers of its own.
func (s *Server) tapOperator(w http.ResponseWriter, r *http.Request) {
	defer s.watchers.Add(-1)
	if s.watchers.Add(1) > maxWatchers {
		Refuse(w, http.StatusTooManyRequests, tunnel.Overloaded.String(), errWatchers)
		return
	}
	s.tap(w, r, r.URL.Query().Has("local"))
}

// tap answers GET /v1/tap: a line of JSON for each conn that opens or ends, until the client leaves. If local is true,
// it shows only the conns of this replica.
func (s *Server) tap(w http.ResponseWriter, r *http.Request, local bool) {
	node := tunnel.NodeName("")
	if name := r.URL.Query().Get("node"); name != "" {
		var err error
		if node, err = tunnel.ParseNodeName(name); err != nil {
			Refuse(w, http.StatusBadRequest, "", err)
			return
		}
	}
	control := http.NewResponseController(w)
	// The server's timeouts are for short answers, and this one is long. Setting a deadline fails only if the conn has
	// ended.
	control.SetReadDeadline(time.Time{})
	control.SetWriteDeadline(time.Now().Add(maxStall))
	watcher := s.cfg.Tap.Watch(node)
	defer watcher.Close()
	var following sync.WaitGroup
	defer following.Wait()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	if !local && s.cfg.Peers != nil {
		following.Go(func() {
			s.guardFollower(watcher, func() { s.followAll(ctx, node, watcher) })
		})
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	lines := json.NewEncoder(w)
	for {
		if !watcher.Waiting() {
			if err := control.Flush(); err != nil {
				return
			}
		}
		line, ok := watcher.Next(ctx)
		control.SetWriteDeadline(time.Now().Add(maxStall))
		if !ok || lines.Encode(line) != nil {
			return
		}
	}
}

// guardFollower calls f. If f panics, it tells the watcher that conns are missing.
func (s *Server) guardFollower(watcher *tap.Watcher, f func()) {
	err := tunnel.Guard(s.cfg.Log, s.cfg.Counters, "conns of replicas are missing", func() error { f(); return nil })
	if err != nil {
		watcher.Put(tap.Line{Warning: fmt.Sprintf("conns of other replicas are missing here: %v", err)})
	}
}

// followAll gives the watcher the lines of every other replica, until ctx is done.
func (s *Server) followAll(ctx context.Context, node tunnel.NodeName, watcher *tap.Watcher) {
	var mu sync.Mutex
	followed := make(map[string]bool) // ids of replicas; guarded by mu
	var following sync.WaitGroup
	defer following.Wait()
	for {
		changed := s.cfg.Peers.Changed()
		for _, other := range s.cfg.Peers.Others() {
			mu.Lock()
			known := followed[other.ID]
			followed[other.ID] = true
			mu.Unlock()
			if known {
				continue
			}
			// find returns how to dial the replica now. If the replica has gone, find returns nil, which ends this follower.
			// find then also deletes the replica from followed: when the replica is back, followAll starts a new follower.
			find := func() dialFunc {
				mu.Lock()
				defer mu.Unlock()
				for _, now := range s.cfg.Peers.Others() {
					if now.ID == other.ID {
						return now.Dial
					}
				}
				delete(followed, other.ID)
				return nil
			}
			following.Go(func() {
				s.guardFollower(watcher, func() { followReplica(ctx, other.Remote, find, node, watcher) })
			})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(followPause):
		case <-ctx.Done():
			return
		}
	}
}

// dialFunc opens a conn to the API of a replica.
type dialFunc func(context.Context) (net.Conn, error)

// followReplica gives the watcher the lines of the replica at an address, again and again, until ctx is done, find
// returns nil, or the replica turns out to have no tap.
func followReplica(
	ctx context.Context, address string, find func() dialFunc, node tunnel.NodeName, watcher *tap.Watcher,
) {
	tell := func(text string) { watcher.Put(tap.Line{Warning: "the replica at " + address + ": " + text}) }
	missing, pause := false, followPause // missing is true after the watcher was told that lines are missing
	answers := func() {
		if missing {
			tell("it answers again, so its conns are shown from here on")
		}
		missing, pause = false, followPause
	}
	for dial := find(); dial != nil; dial = find() {
		err := follow(ctx, clientOf(dial), node, answers, func(l tap.Line) error { watcher.Put(l); return nil })
		if ctx.Err() != nil {
			return
		}
		if _, older := errors.AsType[errOlder](err); older || tunnel.CodeOf(err) == tunnel.NoSuchNode {
			tell(errNoTap.Error())
			return
		}
		if !missing {
			missing = true
			tell(fmt.Sprintf("%v; its conns are missing here until it answers again", err))
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		pause = min(2*pause, maxFollowPause)
	}
}

// errNoTap is the error of a replica that cannot show its conns.
var errNoTap = errors.New("it is older than this replica and cannot show its conns")

// errStreamEnded is the error of a process that ends a stream of lines.
var errStreamEnded = errors.New("the process has ended the stream: it has stopped, or is about to")

// follow calls answers when a process answers, and then each for every line, until ctx is done, each fails, or the
// process ends the stream. It always returns an error.
func follow(
	ctx context.Context, client *http.Client, node tunnel.NodeName, answers func(), each func(tap.Line) error,
) error {
	path := "/v1/tap"
	if node != "" {
		path += "?" + url.Values{"node": {string(node)}}.Encode()
	}
	return eachLine(ctx, client, path, answers, func(text []byte) error {
		var line tap.Line
		if err := json.Unmarshal(text, &line); err != nil {
			return fmt.Errorf("a line is no event: %w", err)
		}
		return each(line)
	})
}

// eachLine calls answers when a process answers a request, and then each for every line, until ctx is done, each fails,
// or the process ends the stream. It always returns an error.
func eachLine(
	ctx context.Context, client *http.Client, path string, answers func(), each func([]byte) error,
) error {
	response, err := send(ctx, client, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answers()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if err := each(lines.Bytes()); err != nil {
			return err
		}
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case lines.Err() != nil:
		return lines.Err()
	}
	return errStreamEnded
}

// Lines calls each for every line of the answer to a GET request, until ctx is done, each fails, or the process ends
// the answer. It always returns an error. each must not keep the line.
func (c *Client) Lines(ctx context.Context, path string, each func(line []byte) error) error {
	return c.explained(eachLine(ctx, c.http, path, func() {}, each))
}

// Tap calls each for every conn of a node that opens or ends, until ctx is done or each fails; node "": of all nodes.
// It always returns an error.
func (c *Client) Tap(ctx context.Context, node string, each func(tap.Line) error) error {
	return c.explained(follow(ctx, c.http, tunnel.NodeName(node), func() {}, each))
}
