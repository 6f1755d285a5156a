package stream

import (
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// A connection is switched if 0.3 % of its segments are sent again over two seconds or more, and its
// round trip is 20 ms or more.
func TestLosses(t *testing.T) {
	type look struct {
		after        time.Duration // since the last look
		sent, resent uint32        // since the last look; 1<<32 - n: n less than at the last look
	}
	every := func(n int, l look) (all []look) {
		for range n {
			all = append(all, l)
		}
		return all
	}
	const far = 100 * time.Millisecond
	half := 500 * time.Millisecond
	for name, c := range map[string]struct {
		trip  time.Duration // and half of the smoothed one, if a name says that there is a queue
		looks []look
		want  int // look at which it is switched, from 1 on; 0: never
	}{
		"a hundredth":                    {far, every(10, look{half, 300, 3}), 4},
		"just enough":                    {lossyTrip, every(10, look{half, 1000, 3}), 4},
		"just too little":                {far, every(100, look{half, 1001, 3}), 0},
		"a short way":                    {lossyTrip - 1, every(100, look{half, 300, 3}), 0},
		"nothing is lost":                {far, every(1200, look{half, 10_000, 0}), 0},
		"one in a while":                 {far, every(100, look{20 * time.Second, 200, 1}), 0},
		"two at once, few segments":      {far, []look{{half, 20, 2}, {lossTime, 20, 0}, {lossLimit, 20, 0}}, 0},
		"a slow connection":              {far, every(10, look{lossTime, 30, 1}), 3},
		"long idle, then a few are lost": {far, []look{{time.Hour, 100, 2}, {half, 100, 1}}, 0},
		"it begins after a good minute": {
			far, append(every(120, look{half, 1000, 0}), every(10, look{half, 100, 2})...), 124,
		},
		"a narrow link with a queue": {far, every(20, look{half, 10, 2}), 0},
		"a slow link with a queue":   {far, every(20, look{half, 90, 2}), 0},
		"a wide link with a queue":   {far, every(10, look{half, 100, 2}), 4},
		"a narrow rate, and no more": {far, every(10, look{half, 10, 2}), 4},
		"a path of several ends": {
			far, []look{{lossTime, 100_000, 10}, {half, 1000, 1}, {lossTime, 1<<32 - 50_000, 1<<32 - 5}, {lossTime, 1000, 0}}, 0,
		},
		"the counters wrap": {far, append([]look{{lossTime, 0xffff_ff00, 0}}, every(10, look{half, 300, 3})...), 5},
	} {
		var l losses
		has, now, got := segments{trip: c.trip, smooth: c.trip}, time.Now(), 0
		if strings.HasSuffix(name, "with a queue") {
			has.smooth = 2 * c.trip
		}
		l.many(has, now) // the first look of a connection only counts
		for i, look := range c.looks {
			now = now.Add(look.after)
			has.sent, has.resent = has.sent+look.sent, has.resent+look.resent
			if l.many(has, now) {
				if got > 0 {
					t.Errorf("%s: it is switched twice", name)
				}
				got = i + 1
			}
		}
		if got != c.want {
			t.Errorf("%s: switched at look %d, want %d", name, got, c.want)
		}
	}
}

// The losses of a transfer's first moments count, which are over before the first look at its connection: of a new
// connection, and of one that has been idle for long.
func TestLossesOfTheBeginning(t *testing.T) {
	const trip = 100 * time.Millisecond
	now := time.Now()
	for name, before := range map[string]segments{"new": {}, "idle": {sent: 100_000, resent: 10, trip: trip, smooth: trip}} {
		var l losses
		if name == "idle" {
			l.many(before, now.Add(-time.Hour))
		}
		has := segments{sent: before.sent + 1000, resent: before.resent + 200, trip: trip, smooth: trip}
		looks := 0
		for looks < 20 {
			looks++
			l.resume(before, now.Add(-paceInterval))
			if l.many(has, now) {
				break
			}
			before = has
			now, has.sent = now.Add(paceInterval), has.sent+1000
		}
		if want := int(lossTime / paceInterval); looks != want {
			t.Errorf("%s: switched at look %d, want %d", name, looks, want)
		}
	}
}

// lossy makes a connection with a congestion control, and tells it twice what the kernel has counted of
// a connection that loses packets.
func lossy(t *testing.T, control *Congestion, before string) *carrier {
	t.Helper()
	raw, _ := tcpPair(t)
	c, _ := carry(raw, time.Hour, control)
	if before != "" {
		c.raw.Control(func(fd uintptr) {
			if err := setCongestion(fd, before); err != nil {
				t.Fatal(err)
			}
		})
	}
	c.judge(segments{trip: time.Second})
	c.losses.since = c.losses.since.Add(-lossTime)
	c.judge(segments{sent: 1000, resent: 10, trip: time.Second})
	return c
}

// algorithm returns the congestion control of a connection.
func algorithm(t *testing.T, c *carrier) (name string) {
	t.Helper()
	c.raw.Control(func(fd uintptr) {
		var err error
		if name, err = congestionOf(fd); err != nil {
			t.Fatal(err)
		}
	})
	return name
}

// A connection that loses packets is switched to bbr once, with a log line for the first of them.
func TestCongestionAuto(t *testing.T) {
	if err := tryCongestion(lossControl); err != nil {
		t.Skipf("this kernel does not let this process choose bbr: %v", err)
	}
	counters, log := new(tunnel.Counters), new(journal)
	control, err := NewCongestion("", counters, log.logger())
	if err != nil {
		t.Fatal(err)
	}
	if hint := control.Hint(); hint != "" {
		t.Errorf("the hint is %q", hint)
	}
	for range 2 {
		if got := algorithm(t, lossy(t, control, "reno")); got != lossControl {
			t.Errorf("it has %s", got)
		}
	}
	if n := counters.Switched.Load(); n != 2 {
		t.Errorf("%d are counted, want 2", n)
	}
	if n := len(log.lines("level=INFO", "was switched to bbr")); n != 1 {
		t.Errorf("%d lines at info, want 1:\n%s", n, log)
	}
	if got, want := control.Status(), "2 connections that lost packets were switched to bbr"; got != want {
		t.Errorf("the status is %q, want %q", got, want)
	}
	lossy(t, control, lossControl)
	if n := counters.Switched.Load(); n != 2 {
		t.Error("a connection that had bbr counts as switched")
	}
}

// With "system", and without a setting, no connection is changed. A name is given to each at its start.
func TestCongestionFixed(t *testing.T) {
	counters := new(tunnel.Counters)
	log := slog.New(slog.DiscardHandler)
	raw, _ := tcpPair(t)
	c, _ := carry(raw, time.Hour, nil)
	system := algorithm(t, c)
	for setting, want := range map[string]string{CongestionSystem: system, "reno": "reno"} {
		control, err := NewCongestion(setting, counters, log)
		if err != nil {
			t.Fatal(err)
		}
		if got := algorithm(t, lossy(t, control, "")); got != want {
			t.Errorf("%s: it has %s, want %s", setting, got, want)
		}
		if control.Status() == "" || control.Hint() != "" {
			t.Errorf("%s: the status is %q, the hint %q", setting, control.Status(), control.Hint())
		}
	}
	if got := algorithm(t, lossy(t, nil, "")); got != system {
		t.Errorf("without a setting it has %s, want %s", got, system)
	}
	if n := counters.Switched.Load(); n != 0 {
		t.Errorf("%d are counted as switched", n)
	}
}

// An algorithm that the kernel does not have is an error that names those that it has.
func TestCongestionUnknown(t *testing.T) {
	_, err := NewCongestion("nosuch", new(tunnel.Counters), slog.New(slog.DiscardHandler))
	const want = "this kernel has no nosuch (net.ipv4.tcp_available_congestion_control: "
	if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "reno") {
		t.Errorf("the error is: %v", err)
	}
}

// Without bbr, the hint and the status say what to do, and connections are left alone.
func TestCongestionRefused(t *testing.T) {
	for err, want := range map[error]string{
		syscall.ENOENT: "modprobe tcp_bbr", syscall.EPERM: "net.ipv4.tcp_allowed_congestion_control=",
		errors.ErrUnsupported: "only Linux",
	} {
		answer := err
		control := &Congestion{
			try: func(string) error { return answer }, switches: true, counters: new(tunnel.Counters),
			log: slog.New(slog.DiscardHandler),
		}
		control.refused(err)
		if hint := control.Hint(); !strings.Contains(hint, want) {
			t.Errorf("%v: the hint is %q", err, hint)
		}
		if control.Status() != control.Hint() {
			t.Errorf("%v: the status is %q", err, control.Status())
		}
		answer = nil // the operator has done it
		if hint := control.Hint(); hint != "" {
			t.Errorf("%v: the hint is still %q", err, hint)
		}
	}
}
