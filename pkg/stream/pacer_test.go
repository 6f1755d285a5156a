package stream

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Data connections give way to the session's own connection on a narrow link, and only there.
func TestNextPace(t *testing.T) {
	const unbounded = 0
	for name, c := range map[string]struct {
		rate, total int64
		busy        int
		own         need
		want        int64
	}{
		"a wide link":                                {unbounded, narrowRate, 16, starves, unbounded},
		"nobody else needs a narrow link":            {unbounded, 12_000, 16, none, unbounded},
		"no data connection sends":                   {unbounded, 12_000, 0, starves, unbounded},
		"both wait":                                  {unbounded, 12_000, 16, waits, 6_000},
		"the session's own starves":                  {unbounded, 12_000, 16, starves, 3_000},
		"it starves although they have half":         {6_000, 12_000, 16, starves, 3_000},
		"it starves although they have next to none": {leastPace, 100, 16, starves, leastPace},
		"it is better, and they get more":            {3_000, 12_000, 16, waits, 3_000 + 3_000/paceGrowth},
		"they get half at most":                      {6_000, 12_000, 16, waits, 6_000},
		"it needs nothing, and they get more":        {6_000, 6_000, 16, none, 6_000 + 6_000/paceGrowth},
		"it needs nothing for long":                  {narrowRate, narrowRate, 16, none, unbounded},
		"the link has become wide":                   {16_000, 2 * narrowRate, 16, waits, unbounded},
		"they have ended":                            {3_000, 12_000, 0, starves, unbounded},
	} {
		if got := nextPace(c.rate, c.total, c.busy, c.own); got != c.want {
			t.Errorf("%s: %d bytes a second, want %d", name, got, c.want)
		}
	}
}

// The kernel is told of a bound, and that there is none any more.
func TestPacerTellsTheKernel(t *testing.T) {
	raw, _ := tcpPair(t)
	c, _ := carry(raw, time.Hour)
	c.alone()
	var p pacer
	p.add(c)
	of := p.data[c]
	for _, step := range []struct {
		rate  int64
		n     int
		want  int64
		retry time.Duration
	}{
		{6_000, 3, 2_000, pacedBackoff},
		{6_000, 6, 1_000, pacedBackoff},
		{1, 16, 1, pacedBackoff},
		{0, 0, -1, dataBackoff},
	} {
		of.bound(c, step.rate, step.n)
		var rate uint64
		var retry int
		var err, unknown error
		if cerr := c.raw.Control(func(fd uintptr) {
			rate, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE)
			retry, unknown = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS)
		}); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		if int64(rate) != step.want { //nolint:gosec // that is how the kernel says unbounded
			t.Errorf("%d bytes a second for %d: the kernel has %d, want %d", step.rate, step.n, rate, step.want)
		}
		if unknown == nil && time.Duration(retry)*time.Millisecond != step.retry {
			t.Errorf("%d bytes a second: the kernel sends again after %d ms at most, want %v", step.rate, retry, step.retry)
		}
	}
}
