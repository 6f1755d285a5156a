// Package api is the JSON API by which the commands of an operator ask a running cloud or edge.
//
//	srv := api.New(api.Config{Mode: "cloud", Sessions: directory.Sessions, Peers: others, …})
//	debug.API = srv.Handler()                 // on the admin socket, which only our own user may use
//	peers.Config{API: srv.Dial, …}            // the other replicas ask for this replica's own part
//
//	client := api.NewClient("/run/tunnel-cloud/admin.sock")
//	nodes, err := client.Nodes(ctx)
//
//	GET    /v1/nodes           every node of every replica, connected and missing
//	GET    /v1/status          this process: checks, listeners, counts, other replicas
//	GET    /v1/statuses        this process, and then every other replica, as /v1/status shows each
//	GET    /v1/certificates    the certificates of every replica and node; of an edge: its own
//	POST   /v1/certificates/renew  asks edges to renew their certificates; of an edge: renews its own
//	POST   /v1/ping?node=N     the round trip to a node; &target=HOST:PORT: to a target behind it
//	POST   /v1/trace?node=N&target=HOST:PORT   each hop to a target, and which one refuses
//	GET    /v1/tap             conns as they open and end, a line of JSON each, while the client reads; ?node=N: of one
//	DELETE /v1/nodes/N         forget a missing node
//
// An edge serves only /v1/status, /v1/statuses and /v1/certificates. With ?local, a replica asks no other replica.
//
// How one request travels: the command ── unix socket ─▶ replica A ── a conn of the session that B has opened
// with A ─▶ replica B. B answers as with ?local, and A merges the answers. If a replica does not answer, the list is
// incomplete, and NodeList.Incomplete says why.
//
// A later release may add fields to the answers of v1. It removes no field, and changes the meaning of none. No answer
// holds a secret. Still, other users must not read the answers: they name nodes and addresses.
package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	json2 "github.com/go-json-experiment/json" // Go 1.27's encoding/json/v2: at 10,000 nodes twice as fast
	json1 "github.com/go-json-experiment/json/v1"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/peers"
	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Version is the version of the API, and the first part of its paths.
const Version = "v1"

const (
	// askTimeout is how long another replica may take for its part of an answer.
	askTimeout = 2 * time.Second
	// maxAnswer is the longest answer of a replica, in bytes: it has room for some 100,000 nodes.
	maxAnswer = 64 << 20
	// pingTimeout is how long one ping may take. The edge gives up dialling a target earlier.
	pingTimeout = 15 * time.Second
	maxHeader   = 16 << 10 // bytes
)

// Config is what a Server shows. Any goroutine may call the functions. They must return at once.
type Config struct {
	Mode     string // "cloud" or "edge"
	Software string
	Replica  string // name of this process for people: its pod or its machine
	Node     string // the node of an edge
	// Checks returns the checks of /readyz.
	Checks    func() []admin.Check
	Listeners func() []string // returns the listeners, in the form of the log's start-up line; nil: there are none
	Counters  *tunnel.Counters
	Sessions  func() []*tunnel.Session
	// Coming returns how many nodes are expected to have a session soon, since they are about to come from the process
	// that this one has replaced; nil: none.
	Coming func() int
	// Certificates returns the certificates of this process; nil: the Server shows none. The Server sets Held.Replica.
	Certificates func() Held

	// Only for an edge.

	// RenewNow renews the certificate of this edge; nil: the edge does not renew its certificate.
	RenewNow func(context.Context) error

	// Only for a cloud.

	// AskToRenew asks the edge of a session to renew its certificate within a time.
	AskToRenew func(s *tunnel.Session, within time.Duration) error
	Dialer     tunnel.Dialer        // reaches nodes through every replica
	Inventory  *inventory.Inventory // nil: the cloud remembers no nodes
	// The Server calls Forgotten with each node that the inventory has forgotten, unless Forgotten is nil.
	Forgotten func(tunnel.NodeName)
	// Expected returns the nodes that Kubernetes has. If Expected is nil, or known is false, nobody knows them.
	Expected func() (names []tunnel.NodeName, known bool)
	Peers    *peers.Peers     // nil: there are no other replicas
	Tap      *tap.Hub         // shows conns as they open and end
	Refusals *tunnel.Refusals // keeps the last refused callers; nil: nobody keeps them

	Log *slog.Logger
}

// Server answers requests of operators and of other replicas. Handler is for operators. Other replicas reach it by
// Dial, which works while the Server runs as the module "api".
type Server struct {
	// Set once.
	cfg     Config
	started time.Time
	inside  *insideListener

	watchers atomic.Int32 // the requests GET /v1/tap of operators that are being served or admitted
}

var _ tunnel.Module = (*Server)(nil)

// New returns a server.
func New(cfg Config) *Server {
	return &Server{cfg: cfg, started: time.Now(), inside: newInsideListener()}
}

// Name implements tunnel.Module.
func (*Server) Name() string { return "api" }

// Dial opens a conn to this server, for another replica. The server answers requests on this conn as if they had
// ?local.
func (s *Server) Dial(ctx context.Context) (net.Conn, error) { return s.inside.dial(ctx) }

// Run implements tunnel.Module: it serves the conns of Dial until ctx is done.
func (s *Server) Run(ctx context.Context) error {
	srv := &http.Server{
		Handler: s.handler(true), ReadTimeout: askTimeout, WriteTimeout: pingTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
	}
	srv.SetKeepAlivesEnabled(false) // a conn of the tunnel is for one request
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	var learning sync.WaitGroup
	defer learning.Wait()
	lctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if s.cfg.Peers != nil && s.cfg.Inventory != nil {
		learning.Go(func() {
			//nolint:errcheck // it is logged
			tunnel.Guard(s.cfg.Log, s.cfg.Counters, "nodes of other replicas are not learnt", func() error {
				s.learn(lctx)
				return nil
			})
		})
	}
	if err := srv.Serve(s.inside); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Handler returns the handler of the operator's paths, /v1/….
func (s *Server) Handler() http.Handler { return s.handler(false) }

// handler returns the handler of all paths. If local is true, the server passes no request on to other replicas.
func (s *Server) handler(local bool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { Answer(w, s.status()) })
	mux.HandleFunc("GET /v1/statuses", func(w http.ResponseWriter, r *http.Request) {
		list := StatusList{APIVersion: Version}
		if local || r.URL.Query().Has("local") {
			list.Statuses = []*Status{s.status()}
		} else {
			list.Statuses, list.Incomplete = s.Statuses(r.Context())
		}
		Answer(w, list)
	})
	mux.HandleFunc("GET /v1/certificates", func(w http.ResponseWriter, r *http.Request) {
		if local || r.URL.Query().Has("local") {
			Answer(w, s.certificates())
			return
		}
		Answer(w, s.allCertificates(r.Context()))
	})
	if s.cfg.Mode != "cloud" {
		mux.HandleFunc("POST /v1/certificates/renew", s.renewOwn)
		mux.HandleFunc("/v1/", func(w http.ResponseWriter, _ *http.Request) {
			Refuse(w, http.StatusNotFound, "", errEdge)
		})
		return mux
	}
	mux.HandleFunc("POST /v1/certificates/renew", func(w http.ResponseWriter, r *http.Request) {
		s.renew(w, r, local || r.URL.Query().Has("local"))
	})
	here := func(r *http.Request) bool { return local || r.URL.Query().Has("local") }
	mux.HandleFunc("GET /v1/nodes", func(w http.ResponseWriter, r *http.Request) {
		if here(r) {
			Answer(w, s.local())
			return
		}
		Answer(w, s.Nodes(r.Context()))
	})
	mux.HandleFunc("DELETE /v1/nodes/{node}", func(w http.ResponseWriter, r *http.Request) {
		s.forget(w, r, here(r))
	})
	mux.HandleFunc("GET /v1/holds/{node}", s.holds)
	if local {
		mux.HandleFunc("GET /v1/tap", func(w http.ResponseWriter, r *http.Request) { s.tap(w, r, true) })
	} else {
		mux.HandleFunc("GET /v1/tap", s.tapOperator)
		mux.HandleFunc("POST /v1/ping", s.ping)
		mux.HandleFunc("POST /v1/trace", s.trace)
	}
	return mux
}

// errEdge answers requests for a cloud's paths.
var errEdge = errors.New("this is an edge: ask the cloud about nodes")

// Failure is the body of an answer that is not 2xx.
type Failure struct {
	Text string `json:"error"`
	// Code is the code of a refusal, such as "denied" or "no-such-node", or one of the constants below.
	Code string `json:"code,omitempty"`
}

// CodeConfiguration is the Failure.Code if the server refuses a request because of problems in a configuration.
const CodeConfiguration = "configuration"

// CodeNotStarted is the Failure.Code if a new process could not take over. The old process serves as before.
const CodeNotStarted = "not-started"

// Error implements error.
func (f *Failure) Error() string { return f.Text }

// Refuse answers a request with a [Failure].
func Refuse(w http.ResponseWriter, status int, code string, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(&Failure{Text: err.Error(), Code: code}) //nolint:errcheck // the caller has gone
}

// Answer answers a request with v as JSON.
func Answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if json2.MarshalWrite(w, v, json1.DefaultOptionsV1()) == nil {
		io.WriteString(w, "\n") //nolint:errcheck // the caller has gone
	}
}
