//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

const (
	// idleTime is how long the links of idle nodes are watched.
	idleTime = time.Minute
	// rolled is how many endpoints the Service of the rolling update has.
	rolled = 100
	// rollPause is how long the rolling update waits after it has replaced a pod, before it replaces the next one.
	rollPause = 50 * time.Millisecond
)

// wire asserts what Services cost a link: little while nothing changes, and then what has changed.
func (s *farServices) wire(ctx context.Context, t *testing.T) {
	config := s.tn.read(t, "edge2.toml")
	s.withoutServices(ctx, t, "edge2")
	s.again(ctx, t, "edge1", s.tn.read(t, "edge1.toml")) // neither has connections of earlier steps
	s.ready(ctx, t, "edge1")
	time.Sleep(5 * time.Second) // edge1 is told that the edge of edge2 serves no Services any more
	before := s.onWire(ctx, t)
	time.Sleep(idleTime)
	after := s.onWire(ctx, t)
	with, without := after["edge1"]-before["edge1"], after["edge2"]-before["edge2"]
	t.Logf("idle for %v: %d bytes with Services, %d without: %.2f", idleTime, with, without,
		float64(with)/float64(without))
	if without == 0 || 10*with > 13*without {
		t.Error("Services cost an idle link too much")
	}

	api := newAdmin(t, s.c)
	const slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
	if err := api.do(ctx, http.MethodPost, "/api/v1/namespaces/default/services", jsonType, map[string]any{
		"metadata": map[string]any{"name": "rolled"},
		"spec":     map[string]any{"clusterIP": "10.96.20.8", "ports": []any{map[string]any{"port": 80}}},
	}, nil); err != nil {
		t.Fatal(err)
	}
	slice := func(updated int) any {
		all := make([]any, rolled)
		for i := range all {
			third := 1 // the network of the old pods
			if i < updated {
				third = 2
			}
			all[i] = map[string]any{
				"addresses": []string{fmt.Sprintf("10.99.%d.%d", third, i+1)}, "nodeName": s.c.nodes[i%2],
				"conditions": map[string]any{"ready": true, "serving": true},
			}
		}
		return map[string]any{
			"metadata": map[string]any{
				"name": "rolled-abcde", "labels": map[string]any{"kubernetes.io/service-name": "rolled"},
			},
			"addressType": "IPv4", "endpoints": all,
			"ports": []any{map[string]any{"name": "", "port": 80, "protocol": "TCP"}},
		}
	}
	if err := api.do(ctx, http.MethodPost, slices, jsonType, slice(0), nil); err != nil {
		t.Fatal(err)
	}
	settled := func() int64 { // what edge1 has sent and received until little more comes
		last := s.onWire(ctx, t)["edge1"]
		eventually(ctx, t, time.Minute, "the link to be idle", func(ctx context.Context) error {
			time.Sleep(2 * time.Second)
			before := last
			if last = s.onWire(ctx, t)["edge1"]; last-before > 1000 {
				return fmt.Errorf("%d bytes in two seconds", last-before)
			}
			return nil
		})
		return last
	}
	whole := settled()
	for i := range rolled {
		if err := api.do(ctx, http.MethodPut, slices+"/rolled-abcde", jsonType, slice(i+1), nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(rollPause)
	}
	cost := settled() - whole
	// A change is an endpoint that goes and one that comes: two paths such as
	// endpoint/default/rolled/rolled-abcde/10.99.1.10, and an endpoint of some 40 bytes.
	const change = 2*45 + 40
	t.Logf("a rolling update of %d pods: %d bytes both ways, %d for a pod, whose change has some %d", rolled, cost,
		cost/rolled, change)
	if cost > 5*rolled*change {
		t.Error("a rolling update costs the link much more than its changes")
	}
	for _, path := range []string{"/api/v1/namespaces/default/services/rolled", slices + "/rolled-abcde"} {
		if err := api.do(ctx, http.MethodDelete, path, jsonType, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	s.again(ctx, t, "edge2", config)
	s.all(ctx, t, time.Minute)
}

const jsonType = "application/json"

// again starts the edge of a node again, with another configuration.
func (s *farServices) again(ctx context.Context, t *testing.T, node, text string) {
	t.Helper()
	s.tn.edges[node].kill(t)
	s.tn.write(t, node+".toml", text)
	s.tn.startEdge(ctx, t, node)
}

// withoutServices starts the edge of a node again without [mode.edge.services].
func (s *farServices) withoutServices(ctx context.Context, t *testing.T, node string) {
	t.Helper()
	text, _, found := strings.Cut(s.tn.read(t, node+".toml"), "[mode.edge.services]")
	if !found {
		t.Fatal("the edge serves no Services")
	}
	s.again(ctx, t, node, text)
	s.ready(ctx, t, node)
}

// ready waits until the edge of a node is ready.
func (s *farServices) ready(ctx context.Context, t *testing.T, node string) {
	t.Helper()
	eventually(ctx, t, backAgain, "edge "+node+" to be ready", func(ctx context.Context) error {
		return s.tn.edgeReady(ctx, node)
	})
}

var counted = regexp.MustCompile(`counter packets \d+ bytes (\d+)`)

// onWire returns how many bytes of IP the sessions of each node have sent and received so far. The router of the node
// counts them.
func (s *farServices) onWire(ctx context.Context, t *testing.T) map[string]int64 {
	t.Helper()
	all := make(map[string]int64)
	for i, node := range s.c.nodes {
		nft := func(args ...string) (string, error) {
			inside := []string{"netns", "exec", "te2e-r" + strconv.Itoa(i+1), s.c.home + "/nodebin/nft"}
			return run(command(ctx, "ip", append(inside, args...)...), nil)
		}
		text, err := nft("list", "table", "ip", "wire")
		if err != nil { // there is none yet
			for _, args := range [][]string{
				{"add", "table", "ip", "wire"},
				{"add", "chain", "ip", "wire", "count", "{ type filter hook forward priority 0; }"},
				{"add", "rule", "ip", "wire", "count", "tcp", "dport", "9000", "counter"},
				{"add", "rule", "ip", "wire", "count", "tcp", "sport", "9000", "counter"},
			} {
				if _, err := nft(args...); err != nil {
					t.Fatal(err)
				}
			}
			all[node] = 0
			continue
		}
		for _, m := range counted.FindAllStringSubmatch(text, -1) {
			n, err := strconv.ParseInt(m[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			all[node] += n
		}
	}
	return all
}
