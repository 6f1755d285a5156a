package hostile

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/services/servicesv1"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/test/rig"
)

// What an edge may ask about the Services of the cluster: Services.Watch tells it of them, and Reach connects it to
// their endpoints.

// Where an API server lists what Services are made of.
const (
	servicesPath = "/api/v1/services"
	slicesPath   = "/apis/discovery.k8s.io/v1/endpointslices"
)

// Targets of Reach. The endpoint of shop/web is on evil1. The cloud tells edges of the namespace shop only.
const (
	reachable  = "endpoint/shop/web/web-a/10.88.2.5 TCP 8080"
	deleted    = "endpoint/shop/brief/brief-a/10.88.2.5 TCP 8080"
	elsewhere  = "endpoint/bank/vault/vault-a/10.88.2.5 TCP 8080"
	otherPort  = "endpoint/shop/web/web-a/10.88.2.5 TCP 10250"
	noEndpoint = "endpoint/shop/web/web-a/10.88.2.6 TCP 8080"
	noPath     = "127.0.0.1:22 TCP 22"
)

const (
	// atOnce is how many calls an attacker leaves unanswered at once, and waves how often it does so on one session.
	atOnce, waves = 100, 5
	// calling is what a call costs at most, in bytes: its buffers, and the stacks of its goroutines. perCall is how many
	// goroutines it has: its handler, and one that waits for it.
	calling, perCall = 64 << 10, 2
	// streams is how many streams a connection may have at once.
	streams = 2008
	// aliases is how many Services of the type ExternalName there are, and aliasLen how many bytes each name has.
	// Together they exceed many times what the cloud can send on a stream that nobody reads.
	aliases, aliasLen = 200, 8 << 10
)

func serviceAttacks() []attack {
	refused := `tunnel_conns_refused_total{code="denied"}`
	limit := []string{"ResourceExhausted"}
	denied := func(name, target, because string) attack {
		return attack{
			name: "Reach: " + name, offend: asksFor(target, because), answers: []string{"denied"}, counter: refused,
			holds: 2 * atOnce * calling, goroutines: 2 * atOnce * perCall,
		}
	}
	ofDeleted := denied("a Service that was deleted", deleted, "may just have been deleted")
	ofDeleted.prepare = func(t *testing.T, l *lab) { l.deleteBrief(t) }
	return []attack{
		denied("an endpoint that nobody has", noEndpoint, "is not an endpoint of a Service"), ofDeleted,
		denied("another namespace", elsewhere, "is not an endpoint of a Service"),
		denied("another port", otherPort, "has no port 10250 of TCP"),
		denied("an address in place of a path", noPath, "is no path of an endpoint"),
		{name: "Reach: conns that are not read", offend: unreadReaches, alone: true, answers: []string{"endured"},
			holds: unread * 5 * window, after: 2 * time.Second, goroutines: 2 * unread * perCall},
		{name: "Watch: a flood whose answers are not read", offend: framed(true, floodWatch),
			answers: []string{"closed", "ResourceExhausted"}, counter: limited("streams"),
			holds: 2 * streams * calling, goroutines: 2 * streams * perCall},
		{name: "Watch: more streams than a session may have", offend: manyWatches, answers: limit,
			holds: 2 * atOnce * calling, goroutines: 2 * atOnce * perCall},
		{name: "Watch: batches that are not read", offend: unreadWatches, answers: []string{"endured"},
			holds: 2 * 2 * mib, after: time.Second, goroutines: 2 * atOnce},
		{name: "Watch: digests that are none", offend: wrongDigests, answers: []string{"InvalidArgument"},
			holds: 2 * message, goroutines: 2 * atOnce},
		// This attack is the last one. The cloud keeps memory that it has once used, and would weigh more before the next.
		{name: "Reach: a flood whose answers are not read", offend: framed(true, floodReach),
			answers: []string{"RST REFUSED_STREAM", "closed", "ResourceExhausted"},
			holds:   2 * streams * calling, goroutines: 2 * streams * perCall},
	}
}

// reach calls Reach, with a topic of its own.
func (e *evil) reach(ctx context.Context, target string) (pb.Stream_ReachClient, error) {
	return e.Reach(metadata.AppendToOutgoingContext(ctx, "topic", uuid.NewString(), "target", target))
}

// asksFor asks for a target again and again. Each answer must be the code denied, and a text with because.
func asksFor(target, because string) func(ctx context.Context, v *victim, as string) string {
	one := func(ctx context.Context, e *evil) error {
		call, err := e.reach(ctx, target)
		if err == nil {
			_, err = call.Recv()
		}
		for _, detail := range status.Convert(err).Details() {
			info, ok := detail.(*errdetails.ErrorInfo)
			if ok && info.GetReason() == "REFUSED" && info.GetMetadata()["code"] == "denied" &&
				strings.Contains(status.Convert(err).Message(), because) {
				return nil
			}
		}
		if err == nil {
			return errors.New("it is connected")
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%v, not with %q", err, because) //nolint:errorlint // its code is not that of the attack
	}
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		for range waves {
			errs := make([]error, atOnce)
			var all sync.WaitGroup
			for i := range errs {
				all.Go(func() { errs[i] = one(ctx, e) })
			}
			all.Wait()
			for _, err := range errs {
				if err != nil {
					return err
				}
			}
		}
		return errors.New("denied")
	})
}

// The methods that an edge calls for Services.
const (
	reachMethod = "/tunnel.v1.Stream/Reach"
	watchMethod = "/tunnel.services.v1.Services/Watch"
)

// floodReach asks for an endpoint again and again without waiting for answers. Calls wait for their turn, until the
// connection has as many streams as it may.
func floodReach(f *framer) error {
	return pace(f.ctx, flood/3, func() error {
		select {
		case said := <-f.full:
			return answered(said)
		default:
		}
		_, err := f.headers(reachMethod, "topic", uuid.NewString(), "target", reachable)
		return err
	})
}

// floodWatch opens streams that ask for nothing.
func floodWatch(f *framer) error {
	return pace(f.ctx, flood, func() error {
		_, err := f.headers(watchMethod)
		return err
	})
}

// stuff sends messages until it is stuck, and then until the end. More than 5 windows are an error: so much the cloud
// may hold for a conn.
func stuff(size int, send func() error) error {
	for taken := 0; taken <= 5*window; taken += size {
		if send() != nil {
			return nil
		}
	}
	return fmt.Errorf("the cloud takes more than %d bytes that nobody reads", 5*window)
}

// piece is the size of the messages that attackers stuff, in bytes.
const piece = 16 << 10

// stuffConn stuffs a conn, and tells failed if that is possible.
func stuffConn(send func(*pb.Chunk) error, failed chan<- error) {
	if err := stuff(piece, func() error { return send(&pb.Chunk{Data: make([]byte, piece)}) }); err != nil {
		failed <- err
	}
}

// unreadReaches stuffs conns from evil0 to the endpoint on evil1. Neither end reads.
func unreadReaches(ctx context.Context, v *victim, _ string) string {
	owner, err := v.join(ctx, "evil1", "abort", "services")
	if err != nil {
		return code(err)
	}
	failed := make(chan error, 2*unread)
	go func() {
		for {
			m, err := owner.want("open")
			if err != nil {
				return
			}
			if c, err := connect(ctx, owner, m.GetTopic()); err == nil {
				go stuffConn(c.Send, failed)
			}
		}
	}()
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		for opened, begun := 0, time.Now(); opened < unread; {
			call, err := e.reach(ctx, reachable)
			if err != nil {
				return err
			}
			if header, err := call.Header(); err == nil && header != nil {
				opened++
				go stuffConn(call.Send, failed)
				continue
			}
			// Within a second the cloud tells its part for Services that evil1 has joined.
			if _, err := call.Recv(); time.Since(begun) > hangs {
				return fmt.Errorf("not connected: %v", err) //nolint:errorlint // its code is not that of the attack
			}
			time.Sleep(poll)
		}
		select {
		case err := <-failed:
			return err
		case <-ctx.Done():
			return nil
		}
	})(ctx, v, "evil0")
}

// manyWatches opens streams that ask for nothing. All but four are refused, and the session goes on.
func manyWatches(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		ends := make(chan error, atOnce)
		for range atOnce {
			watch, err := e.watches.Watch(ctx)
			if err != nil {
				return err
			}
			go func() {
				_, err := watch.Recv()
				ends <- err
			}()
		}
		const may = 4
		for range atOnce - may {
			err := <-ends
			if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "4 such calls") {
				return fmt.Errorf("a stream too many ends with %v", err) //nolint:errorlint // likewise
			}
		}
		if err := e.say("stream", "heartbeat", "", &pb.Heartbeat{Sent: 1}); err != nil {
			return err
		}
		if _, err := e.want("heartbeat"); err != nil {
			return fmt.Errorf("the session has ended: %v", err) //nolint:errorlint // likewise
		}
		return status.Error(codes.ResourceExhausted, "all but four")
	})(ctx, v, as)
}

// unreadWatches asks for batch after batch on as many streams as it may have, and reads none.
func unreadWatches(ctx context.Context, v *victim, as string) string {
	next := new(servicesv1.Next)
	unknown := protowire.AppendTag(nil, 15, protowire.BytesType) // of a later release
	next.ProtoReflect().SetUnknown(protowire.AppendBytes(unknown, make([]byte, piece)))
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		failed := make(chan error, 4)
		for range cap(failed) {
			watch, err := e.watches.Watch(ctx)
			if err != nil {
				return err
			}
			go func() {
				if err := stuff(piece, func() error { return watch.Send(next) }); err != nil {
					failed <- err
				}
			}()
		}
		select {
		case err := <-failed:
			return err
		case <-ctx.Done():
			return nil
		}
	})(ctx, v, as)
}

// wrongDigests begins with digests of a wrong length, and sends digests later.
func wrongDigests(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		var err error
		for _, asked := range [][]int{{13}, {0, 8 * services.Buckets}} {
			watch, werr := e.watches.Watch(ctx)
			if werr != nil {
				return werr
			}
			for _, n := range asked {
				watch.Send(&servicesv1.Next{Digests: make([]byte, n)})
			}
			for err = nil; err == nil; {
				_, err = watch.Recv()
			}
			if status.Code(err) != codes.InvalidArgument {
				return fmt.Errorf("digests of %v bytes: %v", asked, err) //nolint:errorlint // likewise
			}
		}
		return err
	})(ctx, v, as)
}

// object is an object of Kubernetes.
type object map[string]any

func newObject(namespace, name string, rest object) object {
	o := object{"metadata": object{"namespace": namespace, "name": name, "resourceVersion": "1"}}
	for key, value := range rest {
		o[key] = value
	}
	return o
}

// addServices gives the cluster its Services, and returns how many items the cloud makes of them for edges.
func (k *apiServer) addServices() (items int) {
	k.nodes = []any{k.node("evil0", "10.88.1.0/24"), k.node("evil1", "10.88.2.0/24")}
	var all, slices []any
	for _, s := range [][2]string{{"shop", "web"}, {"shop", "brief"}, {"bank", "vault"}} {
		all = append(all, newObject(s[0], s[1], object{"spec": object{
			"type": "ClusterIP", "clusterIP": "10.96.0.1", "ports": []object{{"name": "http", "port": 80}}}}))
		slice := newObject(s[0], s[1]+"-a", object{"addressType": "IPv4",
			"ports":     []object{{"name": "http", "port": 8080}},
			"endpoints": []object{{"addresses": []string{"10.88.2.5"}, "nodeName": "evil1"}}})
		slice["metadata"].(object)["labels"] = object{"kubernetes.io/service-name": s[1]}
		slices = append(slices, slice)
	}
	for i := range aliases {
		name := make([]byte, aliasLen/2)
		rand.Read(name)
		all = append(all, newObject("shop", fmt.Sprintf("alias-%d", i), object{"spec": object{
			"type": "ExternalName", "externalName": hex.EncodeToString(name)}}))
	}
	list := func(kind, version string, items []any) object {
		return object{"kind": kind, "apiVersion": version, "metadata": object{"resourceVersion": "1"}, "items": items}
	}
	k.listed[servicesPath] = list("ServiceList", "v1", all)
	k.listed[slicesPath] = list("EndpointSliceList", "discovery.k8s.io/v1", slices)
	return len(k.nodes) + 2*2 + aliases // shop/web and shop/brief, each with an endpoint
}

// wantItems waits until the cloud has so many items for edges.
func (l *lab) wantItems(t *testing.T, n int) {
	t.Helper()
	testkit.Within(t, readyWithin, "the cloud knows the Services", func() error {
		values, err := rig.Metrics(l.CloudHealth())
		if is := values["tunnel_services_items"]; err == nil && is != float64(n) {
			err = fmt.Errorf("%v items, want %d", is, n)
		}
		return err
	})
}

// deleteBrief deletes the Service shop/brief, and returns when the cloud knows.
func (l *lab) deleteBrief(t *testing.T) {
	t.Helper()
	before := l.metric(t, "tunnel_services_items")
	gone := newObject("shop", "brief", object{"kind": "Service", "apiVersion": "v1"})
	text, err := json.Marshal(object{"type": "DELETED", "object": gone})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case l.kube.events <- string(text):
	case <-time.After(takes):
		t.Fatal("the cloud does not watch Services")
	}
	l.wantItems(t, int(before)-2) // the Service and its endpoint
}
