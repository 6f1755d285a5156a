package faults

import (
	"fmt"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// TestKill kills the cloud and the edge of each pair in the middle of traffic, as a
// crash or the kernel's OOM killer does. With ten pairs each of the four ways to do it
// happens ten times.
func TestKill(t *testing.T) {
	pairs, away := 2, []time.Duration{2 * time.Second}
	if soak() {
		pairs, away = 10, append(away, 40*time.Second)
	}
	for i := range pairs {
		t.Run(fmt.Sprint("pair", i), func(t *testing.T) {
			t.Parallel()
			p := newPair(t)
			p.start()
			base := p.baseline()
			for _, d := range away {
				p.kill("cloud", &p.cloud, p.startCloud, d, base)
				p.kill("edge", &p.edge, p.startEdge, d, base)
			}
			for name, health := range map[string]string{"cloud": p.CloudHealth(), "edge": p.EdgeHealth()} {
				if n, err := metric(health, "tunnel_panics_total"); err != nil || n != 0 {
					t.Errorf("the %s has had %v panics (%v)", name, n, err)
				}
			}
		})
	}
}

func (p *pair) kill(name string, process **rig.Process, restart func(), away time.Duration, base baseline) {
	p.t.Helper()
	traffic := p.startTraffic()
	defer traffic.stop()

	fault := time.Now()
	(*process).Kill()
	dead := time.Now()
	time.Sleep(away)
	mended := time.Now()
	restart()
	took := traffic.wait(mended, backWithin)
	// The survivor's kernel learns of the death at once, so everybody does.
	noticed := traffic.judge(fault, dead, mended, atOnce)
	traffic.stop()
	quiet := p.back(base)
	p.t.Logf("%s away for %s: last error after %s, all back after %s, quiet after %s",
		name, away, noticed.Round(time.Millisecond), took.Round(time.Millisecond), quiet.Round(time.Millisecond))
}
