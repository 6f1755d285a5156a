package page

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/api"
)

// keep is how long the server uses an answer again. So the server asks the replicas at most once in this time, even if
// many pages are open.
const keep = 2 * time.Second

// Data is the answer of GET /data.json: the answers of `tunnel ls -o json` and, for each replica, of
// `tunnel status -o json`.
type Data struct {
	Nodes    *api.NodeList `json:"nodes"`
	Replicas []*api.Status `json:"replicas"` // this replica first, then the others by name
	// Incomplete says what the page lacks, for instance because a replica has not answered.
	Incomplete []string `json:"incomplete,omitempty"`
}

// collect asks the source.
func collect(ctx context.Context, source Source) *Data {
	d := new(Data)
	var asking sync.WaitGroup
	var incomplete []string
	asking.Go(func() { d.Nodes = source.Nodes(ctx) })
	asking.Go(func() { d.Replicas, incomplete = source.Statuses(ctx) })
	asking.Wait()
	slices.SortStableFunc(d.Replicas[1:], func(a, b *api.Status) int { return cmp.Compare(a.Replica, b.Replica) })
	d.Incomplete = slices.Concat(d.Nodes.Incomplete, incomplete)
	return d
}

// cache keeps the last answer, compressed.
type cache struct {
	mu   sync.Mutex // guards the following; held while get makes an answer, so that get makes one at a time
	gzip []byte
	made time.Time
}

// get returns the last answer, or a new one if the last one is older than keep.
func (c *cache) get(source Source) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.made) < keep {
		return c.gzip, nil
	}
	var b bytes.Buffer
	// The fastest level: a list of nodes shrinks to a tenth by any.
	z, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		return nil, err
	}
	// Do not use the request's context: other requests wait for this answer, too. The source limits the time itself.
	if err = json.NewEncoder(z).Encode(collect(context.Background(), source)); err != nil {
		return nil, err
	}
	if err = z.Close(); err != nil {
		return nil, err
	}
	c.gzip, c.made = b.Bytes(), time.Now()
	return c.gzip, nil
}

func (s *Server) serveData(w http.ResponseWriter, r *http.Request) {
	answer, err := s.data.get(s.source)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Vary", "Accept-Encoding")
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		w.Write(answer)
		return
	}
	z, err := gzip.NewReader(bytes.NewReader(answer))
	if err == nil {
		_, err = io.Copy(w, z)
	}
	if err != nil {
		s.log.Debug("sending the data of the status page", "err", err)
	}
}
