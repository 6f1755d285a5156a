package relay

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
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

// healthTimeout bounds each step of a request to a healthPort.
const healthTimeout = 5 * time.Second

// serveHealth answers at the healthPorts of the plan until ctx is done.
func (r *Relay) serveHealth(ctx context.Context) {
	open := make(map[healthPort]*http.Server)
	var serving sync.WaitGroup
	defer serving.Wait()
	defer func() {
		for _, server := range open {
			server.Close()
		}
	}()
	ticker := time.NewTicker(r.every)
	defer ticker.Stop()
	for {
		r.mu.Lock()
		want, changed := maps.Clone(r.plan.health), r.changed.Next()
		r.mu.Unlock()
		for at, server := range open {
			if want[at] == 0 {
				server.Close()
				delete(open, at)
			}
		}
		for at := range want {
			if open[at] != nil {
				continue
			}
			ln, err := new(net.ListenConfig).Listen(ctx, "tcp", ":"+strconv.Itoa(int(at.port)))
			if err != nil {
				if n, ok := r.warnHealth.Allow(); ok {
					r.log.Warn("load balancers are not told whether this node has endpoints: the edge tries again",
						"service", nameOf(at.path), "err", err, "skipped", n)
				}
				continue
			}
			server := &http.Server{
				Handler:     http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { r.answerHealth(w, at.path) }),
				ReadTimeout: healthTimeout, WriteTimeout: healthTimeout, IdleTimeout: time.Minute, MaxHeaderBytes: 8 << 10,
			}
			open[at] = server
			serving.Go(func() {
				err := tunnel.Guard(r.log, r.cfg.Counters, "the port ends", func() error { return server.Serve(ln) })
				if !errors.Is(err, http.ErrServerClosed) {
					r.log.Warn("a port for load balancers has ended", "service", nameOf(at.path), "err", err)
				}
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-ticker.C:
		}
	}
}

// answerHealth answers as kube-proxy does (pkg/proxy/healthcheck/service_health.go of Kubernetes): the status is 200 if
// endpoints on this node are ready, else 503.
func (r *Relay) answerHealth(w http.ResponseWriter, path services.Path) {
	namespace, name, _ := services.CutService(path)
	ready := r.readyHere(path)
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
		"localEndpoints": ready, "serviceProxyHealthy": true,
	})
}

// readyHere returns how many addresses of this node are ready endpoints of a Service.
func (r *Relay) readyHere(path services.Path) int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	ready := make(map[netip.Addr]struct{})
	for _, e := range r.state.Endpoints(path) {
		if addr, err := netip.ParseAddr(e.GetAddress()); err == nil && e.GetReady() && e.GetNode() == r.planner.node {
			ready[addr.Unmap()] = struct{}{}
		}
	}
	return len(ready)
}
