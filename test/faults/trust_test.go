package faults

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// TestStrangeCloud restarts the cloud with a certificate of another authority, and
// then with the right one.
func TestStrangeCloud(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.start()
	p.cloud.Kill()
	stranger, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Certify(stranger); err != nil {
		t.Fatal(err)
	}
	p.startCloud()
	testkit.Within(t, backWithin, "the edge says why it does not join", func() error {
		log := p.EdgeLog.String()
		for _, want := range []string{"certificate signed by unknown authority", "cert in [mode.edge.stream.client]"} {
			if !strings.Contains(log, want) {
				return fmt.Errorf("its log lacks %q", want)
			}
		}
		return nil
	})
	if err := p.sessions(0); err != nil {
		t.Error(err)
	}
	p.cloud.Kill()
	if err := p.Certify(p.CA()); err != nil {
		t.Fatal(err)
	}
	p.startCloud()
	p.waitReady(patience)
}

// TestRevokedToken takes the node's line out of the token file and puts it back.
func TestRevokedToken(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.start()
	up := make(chan struct{})
	held := make(chan error, 1)
	go func() { held <- tryHold(t.Context(), p.Door("hold"), false, func() { close(up) }) }()
	select {
	case <-up:
	case err := <-held:
		t.Fatal(err)
	}

	revoked := time.Now()
	if err := p.Allow(false); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-held:
		took := time.Since(revoked)
		if took > time.Second+atOnce/2 { // the promise, and a busy machine
			t.Errorf("a conn of the revoked node lived %s, want one second", took)
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a conn of the revoked node ended with %v, want a reset", err)
		}
		t.Logf("gone %s after the file had changed", took.Round(time.Millisecond))
	case <-time.After(atOnce):
		t.Fatal("a conn of the revoked node goes on")
	}
	testkit.Within(t, atOnce, "the session is gone", func() error { return p.sessions(0) })

	// The first new attempt comes 5 to 10 s later and is refused, the next one 10 to
	// 20 s after that.
	testkit.Within(t, patience, "the edge tries again", func() error {
		n, err := metric(p.CloudHealth(), "tunnel_joins_refused_total")
		if err == nil && n == 0 {
			err = errors.New("no join was refused")
		}
		return err
	})
	if refused := time.Since(revoked); refused < 3*time.Second {
		t.Errorf("the refused edge tried again %s later; it should leave the cloud alone", refused)
	}
	testkit.Within(t, patience, "the edge says what to do about a refused token", func() error { // the cloud counts before
		if !strings.Contains(p.EdgeLog.String(), "check that this node's line in the cloud's token file") {
			return errors.New("its log does not")
		}
		return nil
	})
	if err := p.Allow(true); err != nil {
		t.Fatal(err)
	}
	p.waitReady(20*time.Second + atOnce)
	if n, err := metric(p.CloudHealth(), "tunnel_joins_refused_total"); err != nil || n > 2 {
		t.Errorf("%v joins were refused (%v); want one, or two", n, err)
	}
	if err := tryEcho(t.Context(), p.Door("echo")); err != nil {
		t.Error(err)
	}
}

// TestShortConns checks that conns leave nothing behind, however they end.
func TestShortConns(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.start()
	base := p.baseline()

	const conns, workers = 2000, 20
	ways := []func() error{
		func() error { return tryEcho(t.Context(), p.Door("echo")) },
		func() error { return abandon(t, p.Door("hold")) },
		func() error { return abandon(t, p.Door("bulk")) },
		func() error { return p.tryHTTPS(false)(t.Context(), nil) },
	}
	https := len(ways) - 1
	var all sync.WaitGroup
	var cutShort atomic.Int64
	for w := range workers {
		all.Go(func() {
			for i := range conns / workers {
				way := (w + i) % len(ways)
				if err := ways[way](); err != nil && way == https {
					t.Logf("https: %v", err)
					cutShort.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	// The https front door closes a connection whose caller is silent for four seconds. This process is,
	// on a machine that is busy enough.
	silent, err := metric(p.CloudHealth(), `tunnel_limited_total{limit="handshaketimeout"}`)
	if n := float64(cutShort.Load()); err != nil || n > silent {
		t.Errorf("%v https requests have failed; %v callers were silent for too long (%v)", n, silent, err)
	}
	quiet := p.back(base)
	t.Logf("%d conns; quiet after %s", conns, quiet.Round(time.Millisecond))
}

// abandon resets a conn as soon as it works.
func abandon(t *testing.T, door string) error {
	c, closeIt, err := dial(t.Context(), door)
	if err != nil {
		return err
	}
	defer closeIt()
	if err := c.SetDeadline(time.Now().Add(hangs)); err != nil {
		return err
	}
	// The bulk target wants this header and then sends; the other one greets, and
	// takes whatever comes.
	if _, err := c.Write(make([]byte, 16)); err != nil {
		return err
	}
	if _, err := c.Write([]byte{0, 0, 0, 0, 0x10, 0, 0, 0}); err != nil { // a pace
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

// TestHangingTarget dials a target that never answers, and meanwhile others. Two dials try such
// a target (docs/limits.md); the conns behind them wait, and end when it stays silent.
func TestHangingTarget(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.start()
	base := p.baseline()

	var took []time.Duration
	for range 3 { // a busy machine may have no time for another conn while dials hang
		if took = p.besideHangingDials(); len(took) > 0 {
			break
		}
	}
	if len(took) == 0 {
		t.Fatal("no conn to another target was served while dials hung")
	}
	slices.Sort(took)
	// Half of them: a busy machine holds up one or the other.
	if median := took[len(took)/2]; median > 5*time.Second { // the dials hang for twice as long
		t.Errorf("a conn to another target took %s beside dials that hang", median)
	}
	p.back(base)
}

// besideHangingDials returns how long conns to another target took while dials to a target that is silent hung.
func (p *pair) besideHangingDials() (took []time.Duration) {
	p.t.Helper()
	const hanging, tries = 20, 2
	ended := make(chan error, hanging)
	started := time.Now()
	for range hanging {
		go func() {
			c, closeIt, err := dial(p.t.Context(), p.Door("hang"))
			if err != nil {
				ended <- err
				return
			}
			defer closeIt()
			err = c.SetDeadline(time.Now().Add(hangs))
			if err == nil {
				_, err = io.ReadFull(c, make([]byte, 1))
			}
			ended <- orHang(err)
		}()
	}
	testkit.Within(p.t, patience, "the edge dials the target that hangs", func() error {
		n, err := metric(p.EdgeHealth(), "tunnel_conns")
		if err == nil && n < tries && len(ended) == 0 {
			err = fmt.Errorf("%v conns", n)
		}
		return err
	})
	for len(took) < 10 {
		at := time.Now()
		if err := tryEcho(p.t.Context(), p.Door("echo")); err != nil {
			p.t.Error(err)
		}
		if len(ended) > 0 { // on a busy machine
			break
		}
		took = append(took, time.Since(at))
	}
	for range hanging {
		if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
			p.t.Errorf("a conn to a target that hangs ended with %v, want a reset", err)
		}
	}
	if all := time.Since(started); all < 5*time.Second || all > noticeWithin {
		p.t.Errorf("the conns to the target that hangs ended after %s", all)
	}
	return took
}
