package services

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

func item(t testing.TB, p Path, v proto.Message) *pb.Item {
	t.Helper()
	b, err := proto.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return &pb.Item{Path: p, Value: b}
}

func TestStateIsWhatWasApplied(t *testing.T) {
	s := NewState()
	web := ServicePath("shop", "web")
	v4, v6 := EndpointPath("shop", "web", "web-a", "10.0.0.1"), EndpointPath("shop", "web", "web-b", "fd00::1")
	d, err := s.Apply(&pb.Changes{Set: []*pb.Item{
		item(t, v4, &Endpoint{Address: "10.0.0.1", Node: "edge1"}),
		item(t, web, &Service{ClusterIps: []string{"10.96.0.1"}}),
	}}, &pb.Changes{Set: []*pb.Item{
		item(t, v6, &Endpoint{Address: "fd00::1"}),
		item(t, NodePath("edge1"), &Node{Edge: true}),
	}})
	if err != nil || len(d.Set) != 4 || len(d.Deleted) != 0 {
		t.Fatalf("set %d, deleted %d, %v", len(d.Set), len(d.Deleted), err)
	}
	if s.Service("shop", "web").GetClusterIps()[0] != "10.96.0.1" || !s.Node("edge1").GetEdge() {
		t.Fatal("the Service or the Node is not what was set")
	}
	all := s.Endpoints(web)
	if len(all) != 2 || all[0].Path != v4 || all[0].GetNode() != "edge1" || s.Endpoint(v6).GetAddress() != "fd00::1" {
		t.Fatalf("endpoints %v", all)
	}
	if ServiceOf(v4) != web {
		t.Fatalf("%s is of %s", v4, ServiceOf(v4))
	}

	for node, want := range map[string]int{"edge1": 1, "edge2": 0} {
		found := slices.Collect(s.ServicesWith(func(n, a string) bool { return n == node && a == "10.0.0.1" }))
		if len(found) != want || want > 0 && found[0] != web {
			t.Errorf("Services with an endpoint on %s: %v", node, found)
		}
	}

	d, err = s.Apply(&pb.Changes{Deleted: []string{v4, "endpoint/shop/web/none/10.9.9.9"}})
	if err != nil || !slices.Equal(d.Deleted, []Path{v4}) || s.Endpoint(v4) != nil || len(s.Endpoints(web)) != 1 {
		t.Fatalf("deleted %v, %v", d.Deleted, err)
	}
}

// A bucket that is sent as a whole deletes what is not in it, in whichever batch of the series the items are.
func TestWholeBuckets(t *testing.T) {
	s := NewState()
	paths := make([]*pb.Item, 0, 2000)
	for i := range cap(paths) {
		paths = append(paths, item(t, NodePath("n"+strconv.Itoa(i)), &Node{}))
	}
	if _, err := s.Apply(&pb.Changes{Set: paths}); err != nil {
		t.Fatal(err)
	}
	bucket := Bucket(paths[0].GetPath())
	var stay, others int
	for _, p := range paths[1:] {
		switch Bucket(p.GetPath()) {
		case bucket:
			stay++
		default:
			others++
		}
	}
	if stay == 0 {
		t.Fatal("no two paths of 2,000 are in one bucket")
	}
	again := slices.DeleteFunc(slices.Clone(paths[1:]), func(i *pb.Item) bool { return Bucket(i.GetPath()) != bucket })
	d, err := s.Apply(&pb.Changes{Whole: []uint32{uint32(bucket)}}, &pb.Changes{Set: again}) //nolint:gosec // below 256
	if err != nil || len(d.Set) != 0 || !slices.Equal(d.Deleted, []Path{paths[0].GetPath()}) {
		t.Fatalf("set %d, deleted %v, %v", len(d.Set), d.Deleted, err)
	}
	if s.Len() != stay+others {
		t.Fatalf("%d items are left of %d", s.Len(), stay+others)
	}
}

// What one batch of a series sets and another one deletes is set or deleted, as at the end, and not both.
func TestDifferenceIsThatOfTheSeries(t *testing.T) {
	s := NewState()
	comes, goes, stays := item(t, NodePath("a"), &Node{}), item(t, NodePath("b"), &Node{}), item(t, NodePath("c"), &Node{})
	if _, err := s.Apply(&pb.Changes{Set: []*pb.Item{goes, stays}}); err != nil {
		t.Fatal(err)
	}
	again := item(t, NodePath("c"), &Node{Zone: "z"})
	d, err := s.Apply(
		&pb.Changes{Set: []*pb.Item{comes, item(t, NodePath("b"), &Node{Zone: "z"})}, Deleted: []string{stays.GetPath()}},
		&pb.Changes{Set: []*pb.Item{again}, Deleted: []string{goes.GetPath(), comes.GetPath()}},
	)
	if err != nil || len(d.Set) != 1 || d.Set[0] != again || slices.Contains(d.Deleted, stays.GetPath()) ||
		!slices.Contains(d.Deleted, goes.GetPath()) {
		t.Errorf("set %v, deleted %v, %v", d.Set, d.Deleted, err)
	}
	if s.Len() != 1 || s.Node("c").GetZone() != "z" {
		t.Errorf("%d items are left", s.Len())
	}
}

// The digests depend on what the items are, and not on the way to them.
func TestDigestsDependOnTheItemsAlone(t *testing.T) {
	items := make([]*pb.Item, 0, 500)
	for i := range cap(items) {
		items = append(items, item(t, NodePath("n"+strconv.Itoa(i)), &Node{Zone: "z" + strconv.Itoa(i)}))
	}
	direct, around := NewState(), NewState()
	if _, err := direct.Apply(&pb.Changes{Set: items}); err != nil {
		t.Fatal(err)
	}
	shuffled := slices.Clone(items)
	rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	for _, i := range shuffled {
		other := item(t, i.GetPath(), &Node{Zone: "elsewhere"})
		extra := item(t, i.GetPath()+"x", &Node{})
		if _, err := around.Apply(&pb.Changes{Set: []*pb.Item{other, extra}}, &pb.Changes{Set: []*pb.Item{i}},
			&pb.Changes{Deleted: []string{extra.GetPath()}}); err != nil {
			t.Fatal(err)
		}
	}
	if direct.Digests() != around.Digests() {
		t.Fatal("two states of the same items have different digests")
	}
	var flipped Digests
	for _, i := range items {
		flipped.Flip(i.GetPath(), i.GetValue())
	}
	if flipped != direct.Digests() {
		t.Fatal("the cloud's digests differ from the edge's")
	}
	got, err := DecodeDigests(flipped.Encode())
	if err != nil || got != flipped {
		t.Fatalf("the digests have changed on the way: %v", err)
	}
	if _, err := around.Apply(&pb.Changes{Set: []*pb.Item{item(t, NodePath("n0"), &Node{})}}); err != nil {
		t.Fatal(err)
	}
	if direct.Digests() == around.Digests() {
		t.Fatal("the digests do not tell two states apart")
	}
}

// Items that this version cannot read are no part of the state. They count in the digests, so that the cloud does not
// send them again, and they do not stop the others.
func TestUnreadableItems(t *testing.T) {
	s := NewState()
	bad := []*pb.Item{
		{Path: "node/bad", Value: []byte{0xff}},
		{Path: "later/kind", Value: nil},
		{Path: "node//", Value: nil},
		item(t, EndpointPath("a", "b", "c", "nonsense"), &Endpoint{Address: "nonsense"}),
	}
	d, err := s.Apply(&pb.Changes{Set: append(slices.Clone(bad), item(t, NodePath("good"), &Node{}))})
	if err == nil || len(d.Set) != 5 {
		t.Fatalf("set %d, %v", len(d.Set), err)
	}
	if s.Node("bad") != nil || s.Node("good") == nil || len(s.Endpoints("service/a/b")) != 0 {
		t.Fatalf("set %d, %v", len(d.Set), err)
	}
	d, err = s.Apply(&pb.Changes{Set: bad})
	if err != nil || !d.Empty() {
		t.Fatalf("the same items again: %v, %v", d, err)
	}
	var want Digests
	want.Flip(NodePath("good"), nil)
	for _, i := range bad {
		want.Flip(i.GetPath(), i.GetValue())
	}
	if s.Digests() != want {
		t.Fatal("unreadable items do not count in the digests")
	}
}

func TestTargets(t *testing.T) {
	want := Target{EndpointPath("shop", "web", "web-a", "fd00::1"), "TCP", 8080}
	got, err := ParseTarget(want.String())
	if err != nil || got != want {
		t.Fatalf("%v, %v", got, err)
	}
	for _, bad := range []string{
		"", " ", "a b c", "endpoint/a/b/c/d TCP 0", "endpoint/a/b/c/d TCP 65536", "endpoint/a/b/c/d TCP 080",
		"endpoint/a/b/c/d TCP +1", "endpoint/a/b/c/d SCTP 1", "endpoint/a/b/c TCP 1", "endpoint/a/b//d TCP 1",
		"service/a/b TCP 1", "node/a TCP 1", "endpoint/a/b/c/d TCP 1 ", "endpoint/a/b/c/d  TCP 1",
	} {
		if got, err := ParseTarget(bad); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}
}

func FuzzParseTarget(f *testing.F) {
	f.Add("endpoint/shop/web/web-a/10.0.0.1 TCP 8080")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseTarget(s)
		if err == nil && got.String() != s {
			t.Fatalf("%q is read as %q", s, got)
		}
	})
}

// Whatever a cloud sends, the digests are those of the items that the state holds.
func FuzzApply(f *testing.F) {
	f.Add([]byte("\x0a\x0a\x0a\x08node/one"), []byte("\x12\x08node/one"))
	f.Add([]byte("\x0a\x20\x0a\x10endpoint/a/b/c/d\x12\x0c\x0a\x02::\x12\x01n\x12\x01m\x08\x01"), []byte{})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		s := NewState()
		for _, b := range [][]byte{first, second} {
			c := new(pb.Changes)
			if proto.Unmarshal(b, c) != nil {
				return
			}
			s.Apply(c)
		}
		var sum Digests
		for p, value := range s.items {
			sum.Flip(p, []byte(value))
		}
		if sum != s.Digests() {
			t.Fatal("the digests are not those of the items")
		}
		for _, paths := range s.endpoints {
			for _, p := range paths {
				if node, address := placeIn(s.items[p]); node != Home(s.Endpoint(p)) ||
					address != s.Endpoint(p).GetAddress() {
					t.Fatalf("%s is at %s of %s, want %v", p, address, node, s.Endpoint(p))
				}
			}
		}
	})
}

// With too many items, those that have room are right and follow all changes; the others are not asked for again.
func TestTooManyItems(t *testing.T) {
	s := NewState()
	s.most = 3
	apply := func(c *pb.Changes) {
		t.Helper()
		if _, err := s.Apply(c); err != nil {
			t.Fatal(err)
		}
	}
	apply(&pb.Changes{Set: []*pb.Item{
		item(t, NodePath("a"), &Node{Zone: "1"}), item(t, NodePath("b"), &Node{}), item(t, NodePath("c"), &Node{}),
		item(t, NodePath("d"), &Node{}), item(t, ServicePath("shop", "web"), &Service{ClusterIps: []string{"10.96.0.1"}}),
	}})
	has := func(want string) {
		t.Helper()
		got := ""
		for _, name := range []string{"a", "b", "c", "d"} {
			if n := s.Node(name); n != nil {
				got += name + n.GetZone() + " "
			}
		}
		for p := range s.Services() {
			got += p
		}
		if got != want {
			t.Errorf("the state has %q, want %q", got, want)
		}
	}
	has("a1 b c ")
	if d, err := s.Apply(&pb.Changes{Set: []*pb.Item{item(t, NodePath("d"), &Node{})}}); err != nil || !d.Empty() {
		t.Errorf("an item without room comes again: %v, %v", d, err)
	}
	if s.LeftOut() != 2 || s.Len() != 5 {
		t.Errorf("%d of %d items are left out", s.LeftOut(), s.Len())
	}
	var all Digests
	for _, p := range []Path{NodePath("b"), NodePath("c"), NodePath("d")} {
		all.Flip(p, nil)
	}
	// Changes behind the ones without room count, and so do deletions.
	apply(&pb.Changes{
		Set:     []*pb.Item{item(t, NodePath("e"), &Node{}), item(t, NodePath("a"), &Node{Zone: "2"})},
		Deleted: []Path{ServicePath("shop", "web"), NodePath("e")},
	})
	has("a2 b c ")
	apply(&pb.Changes{Deleted: []Path{NodePath("a")}})
	if s.Digests() != all {
		t.Error("the digests lack what is left out")
	}
	large := s.bytes
	s.bytes += maxBytes
	more := &pb.Changes{Set: []*pb.Item{item(t, NodePath("x"), &Node{})}}
	if d, err := s.Apply(more); !errors.Is(err, ErrTooMany) || !d.Empty() {
		t.Errorf("a state with too many bytes takes more: %v, %v", d, err)
	}
	s.bytes = maxBytes - 1000
	again := &pb.Changes{}
	for i := range 200 { // to name a path often makes no room
		again.Set = append(again.Set, item(t, NodePath("b"), &Node{Zone: strconv.Itoa(i % 2)}))
	}
	if _, err := s.Apply(again); !errors.Is(err, ErrTooMany) {
		t.Errorf("a path that is named often: %v", err)
	}
	s.bytes = large
	before := s.Digests()
	endless := new(pb.Changes)
	for i := range 13 {
		endless.Set = append(endless.Set, item(t, NodePath("n"+strconv.Itoa(i)), &Node{}))
	}
	if d, err := s.Apply(endless); !errors.Is(err, ErrTooMany) || !d.Empty() || s.Digests() != before {
		t.Errorf("far too many items: %v", err)
	}
	apply(&pb.Changes{Deleted: []Path{NodePath("b"), NodePath("c"), NodePath("d")}})
	if s.bytes != 0 || s.Len() != 0 {
		t.Errorf("a state without items counts %d bytes, and %d items", s.bytes, s.Len())
	}
}
