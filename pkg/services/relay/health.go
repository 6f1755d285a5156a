package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/netutil"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/services"
)

// healthPort is a port of this node at which a load balancer asks whether the node has endpoints of a Service
// (spec.healthCheckNodePort). Kubernetes gives each such Service a port of its own.
type healthPort struct {
	port uint16
	path services.Path
}

// healthOf returns the healthPort of a Service. ok is false if it has none, and beside kube-proxy, which then answers.
func (n planner) healthOf(path services.Path, service *services.Service) (at healthPort, ok bool) {
	port := service.GetHealthCheckNodePort()
	return healthPort{uint16(port), path}, n.full && port > 0 && port <= 0xffff //nolint:gosec // checked beside it
}

const (
	// healthTimeout bounds each step of a request to a healthPort.
	healthTimeout = 5 * time.Second
	// healthConns bounds the connections to a healthPort at a time.
	healthConns = 64
	// healthRetry is the time between two tries to open a healthPort. After a restart, the last process of the edge has
	// it for a moment.
	healthRetry = 250 * time.Millisecond
)

// healthServer answers at a healthPort. Only the goroutine of serveHealth uses its fields.
type healthServer struct {
	http  *http.Server // nil: the port cannot be opened yet
	since time.Time    // since when not
}

// serveHealth answers at the healthPorts of the plan until ctx is done, while the rules of the plan are in force: a
// load balancer must not send callers to a node that does not serve them. If a port breaks, serveHealth calls fail.
func (r *Relay) serveHealth(ctx context.Context, fail context.CancelCauseFunc) {
	all := make(map[healthPort]*healthServer)
	var serving sync.WaitGroup
	defer serving.Wait()
	closeAll := func(stays func(healthPort) bool) {
		for at, server := range all {
			if stays(at) {
				continue
			}
			if server.http != nil {
				server.http.Close()
			}
			delete(all, at)
		}
	}
	defer closeAll(func(healthPort) bool { return false })
	for {
		r.mu.Lock()
		var want counted[healthPort]
		if r.inForce {
			want = maps.Clone(r.plan.health)
		}
		asked, changed := len(r.plan.health) > 0, r.changed.Next()
		r.mu.Unlock()
		closeAll(func(at healthPort) bool { return want[at] > 0 })
		missing := asked && want == nil
		for at := range want {
			if all[at] == nil {
				all[at] = &healthServer{since: time.Now()}
			}
			if all[at].http == nil && !r.openHealth(ctx, fail, at, all[at], &serving) {
				missing = true
			}
		}
		wait := r.every
		if missing {
			wait = min(wait, healthRetry)
		}
		timer := time.NewTimer(wait)
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
		}
		if timer.Stop(); ctx.Err() != nil {
			return
		}
	}
}

// openHealth opens a healthPort. It reports whether it could.
func (r *Relay) openHealth(
	ctx context.Context, fail context.CancelCauseFunc, at healthPort, server *healthServer, serving *sync.WaitGroup,
) bool {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", ":"+strconv.Itoa(int(at.port)))
	if err != nil {
		if time.Since(server.since) < r.every {
			return false
		}
		if n, ok := r.warnHealth.Allow(); ok {
			r.log.Warn("the health check port of a Service cannot be opened: the edge tries again",
				"service", nameOf(at.path), "err", err, "skipped", n)
		}
		return false
	}
	server.http = &http.Server{
		Handler:     http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) { r.answerHealth(w, q, at.path) }),
		ReadTimeout: healthTimeout, WriteTimeout: healthTimeout, IdleTimeout: healthTimeout, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
	}
	serve, bounded := server.http.Serve, netutil.LimitListener(listen.Steady(ln, r.log), healthConns)
	serving.Go(func() {
		r.guard(fail, func() error {
			if err := serve(bounded); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("listening on %s for load balancers: %w", ln.Addr(), err)
			}
			return nil
		})
	})
	return true
}

// answerHealth answers as kube-proxy does (pkg/proxy/healthcheck/service_health.go of Kubernetes): the status is 200 if
// endpoints on this node are ready, else 503.
func (r *Relay) answerHealth(w http.ResponseWriter, q *http.Request, path services.Path) {
	namespace, name, _ := services.CutService(path)
	at, _ := q.Context().Value(http.LocalAddrContextKey).(net.Addr)
	ready := r.readyHere(path, listen.AddrOf(at).Is4())
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(ready))
	if ready == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	//nolint:errcheck // the caller has gone
	json.NewEncoder(w).Encode(map[string]any{
		"service":        map[string]string{"namespace": namespace, "name": name},
		"localEndpoints": ready, "serviceProxyHealthy": true, // else the port is closed
	})
}

// readyHere returns how many addresses of a family are ready endpoints of a Service on this node.
func (r *Relay) readyHere(path services.Path, v4 bool) int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	ready := make(map[netip.Addr]struct{})
	for _, e := range r.state.Endpoints(path) {
		addr, err := netip.ParseAddr(e.GetAddress())
		if addr = addr.Unmap(); err == nil && addr.Is4() == v4 && e.GetReady() && e.GetNode() == string(r.cfg.Node) {
			ready[addr] = struct{}{}
		}
	}
	return len(ready)
}
