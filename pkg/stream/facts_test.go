package stream

import (
	"io"
	"sync"
	"testing"

	"tunnel.example/tunnel/pkg/tunnel"
)

// watcher notes the sessions that a directory reports.
type watcher struct {
	mu     sync.Mutex
	events []string // "+node" and "-node reason"
}

func (w *watcher) Attached(s *tunnel.Session) { w.add("+" + string(s.Node)) }

func (w *watcher) Detached(s *tunnel.Session) {
	why := "nil"
	if p := s.EndedBecause.Load(); p != nil {
		why = *p
	}
	w.add("-" + string(s.Node) + " " + why)
}

func (w *watcher) add(event string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, event)
}

func (w *watcher) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.events...)
}

// A session counts the bytes of its conns at both ends, and knows the software of the peer. When it ends,
// the directory reports it with the reason.
func TestSessionFacts(t *testing.T) { eachWay(t, sessionFacts) }

func sessionFacts(t *testing.T, r *rig) {
	w := new(watcher)
	r.dir.Watcher = w
	e := r.join("edge1", direct)
	s := r.dir.Lookup("edge1")
	if s.Software != "test" || s.CertificateEnds.Load() != 0 {
		t.Errorf("software %q, certificate ends %d: want test, and no certificate, since a token proves the node",
			s.Software, s.CertificateEnds.Load())
	}
	caller, target := r.pair("edge1")
	if _, err := caller.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(target, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if _, err := target.Write(make([]byte, 300)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(caller, make([]byte, 300)); err != nil {
		t.Fatal(err)
	}
	counted := func(s *tunnel.Session) [2]uint64 {
		sent, received := s.Traffic.Bytes()
		return [2]uint64{sent, received}
	}
	ofCaller, ofTarget := s, e.client.Sessions()[0]
	if r.reaches {
		ofCaller, ofTarget = ofTarget, ofCaller
	}
	r.eventually("the caller's end counts the bytes", func() bool { return counted(ofCaller) == [2]uint64{1000, 300} })
	r.eventually("the target's end counts the bytes", func() bool { return counted(ofTarget) == [2]uint64{300, 1000} })
	caller.Close()
	target.Close()
	r.idle(e)
	e.Stop()
	r.eventually("the end was reported", func() bool { return len(w.all()) == 2 })
	if got := w.all(); got[0] != "+edge1" || got[1] != "-edge1 the edge has stopped" {
		t.Errorf("the directory has reported %q", got)
	}
}
