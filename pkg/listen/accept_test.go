package listen

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
)

func TestAccept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		// The first connection comes after errors of connections and a shortage, which Steady hides.
		ln := Steady(&script{errs: []error{syscall.ECONNABORTED, syscall.EMFILE}}, slog.New(slog.DiscardHandler))
		served := 0
		err := Accept(ctx, ln, func(c net.Conn) {
			c.Close()
			if served++; served == 3 {
				cancel()
				ln.Close()
			}
		})
		if err != nil || served != 3 {
			t.Errorf("served %d connections, error %v; want 3, and none after the end of the context", served, err)
		}
	})
	err := Accept(t.Context(), &script{errs: []error{syscall.EBADF}}, func(net.Conn) { t.Error("served a connection") })
	if !errors.Is(err, syscall.EBADF) {
		t.Errorf("got %v from a listener that is broken, want EBADF", err)
	}
}

func TestOpenAll(t *testing.T) {
	var closed []string
	open := func(line string) (string, error) {
		if strings.HasPrefix(line, "bad") {
			return "", errors.New(line)
		}
		return "open " + line, nil
	}
	closeOne := func(opened string) { closed = append(closed, opened) }
	all, err := OpenAll([]string{"a", "b"}, open, closeOne)
	if err != nil || !slices.Equal(all, []string{"open a", "open b"}) || len(closed) > 0 {
		t.Errorf("got %q, %v; closed %q", all, err, closed)
	}
	all, err = OpenAll([]string{"a", "bad 1", "b", "bad 2"}, open, closeOne)
	if all != nil || err == nil || err.Error() != "bad 1\nbad 2" || !slices.Equal(closed, []string{"open a", "open b"}) {
		t.Errorf("got %q, %v; closed %q", all, err, closed)
	}
}
