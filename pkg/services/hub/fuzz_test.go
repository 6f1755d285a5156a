package hub

import (
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// Whatever an edge sends first, the hub answers with a batch, or with an error that says what is wrong.
func FuzzNext(f *testing.F) {
	h := newHub(Config{})
	for i := range 20 {
		h.Set(anEndpoint(f, i, 0, true))
	}
	h.Synced()
	has := h.digests
	f.Add([]byte{}, []byte{})
	f.Add(has.Encode(), []byte{})
	f.Add(make([]byte, services.Buckets*8), []byte{1})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		e := watch(t, h, "edge1", services.NewState())
		defer e.leave()
		e.nexts <- &pb.Next{Digests: first}
		b, _, err := e.take()
		if err != nil {
			if status.Code(err) != codes.InvalidArgument || len(first) == services.Buckets*8 {
				t.Fatal(err)
			}
			return
		}
		if proto.Size(b) > maxChanges+64 {
			t.Errorf("a batch of %d bytes", proto.Size(b))
		}
		e.nexts <- &pb.Next{Digests: second}
		if len(second) > 0 {
			if err = <-e.ended; status.Code(err) != codes.InvalidArgument {
				t.Error(err)
			}
		}
	})
}

// Whatever target an edge asks for, it reaches only addresses and ports of endpoints.
func FuzzTarget(f *testing.F) {
	h := targetHub(f, Config{Cluster: true})
	h.Synced()
	f.Add("endpoint/shop/web/web-a/10.88.2.1 TCP 8080")
	f.Add("endpoint/shop/web/web-a/fd00::5 TCP 08080")
	f.Add("endpoint/shop/web/web-a/127.0.0.1 TCP 8080")
	f.Add("endpoint/other/db/db-a/10.88.2.9 TCP 8080")
	f.Fuzz(func(t *testing.T, target string) {
		request, refusal := h.Target("edge1", target)
		reachable := []string{"10.88.2.1:8080", "[fd00::5]:8080", "10.244.0.5:8080", "192.0.2.1:8080"}
		if refusal == nil && !slices.Contains(reachable, request.Addr) {
			t.Errorf("%q leads to %+v", target, request)
		}
	})
}
