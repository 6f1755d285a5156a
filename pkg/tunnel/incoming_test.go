package tunnel

import (
	"context"
	"errors"
	"net"
	"testing"
)

// recorder is a way that records the open it is asked to serve.
type recorder struct {
	in   *Incoming
	dial DialFunc
	err  error
}

func (r *recorder) ServeOpen(in *Incoming, dial DialFunc) error {
	r.in, r.dial = in, dial
	return r.err
}

// An open is served on the way that it came. No other message is served, and none at the cloud.
func TestServe(t *testing.T) {
	mark, broken := errors.New("dialled"), errors.New("broken")
	dial := func(context.Context, Request) (net.Conn, error) { return nil, mark }
	way := &recorder{err: broken}
	in := &Incoming{Message: &Message{Category: "tcp", Type: TypeOpen}, Way: way}
	if err := in.Serve(dial); !errors.Is(err, broken) {
		t.Errorf("Serve returns %v, want %v", err, broken)
	}
	if way.in != in {
		t.Error("the way is asked to serve something else")
	}
	if _, err := way.dial(t.Context(), Request{}); !errors.Is(err, mark) {
		t.Error("it dials with something else")
	}
	for what, in := range map[string]*Incoming{
		"no open":      {Message: &Message{Category: "tcp", Type: "cancel"}, Way: new(recorder)},
		"at the cloud": {Message: &Message{Category: "tcp", Type: TypeOpen}},
	} {
		if err := in.Serve(dial); err == nil {
			t.Errorf("%s: it is served", what)
		}
		if way, ok := in.Way.(*recorder); ok && way.in != nil {
			t.Errorf("%s: the way is asked to serve it", what)
		}
	}
}
