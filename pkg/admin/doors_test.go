package admin

import (
	"errors"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Each front door has its own results and its own histogram, and no series is missing at the start.
func TestDoorCollector(t *testing.T) {
	t.Parallel()
	c := new(tunnel.Counters)
	reg := prometheus.NewRegistry()
	reg.MustRegister(NewDoorCollector(c))
	c.Doors[tunnel.DoorTCP].Ended(20*time.Millisecond, nil)
	c.Doors[tunnel.DoorTCP].Ended(0, tunnel.Refusef(tunnel.NoSuchNode, "away"))
	c.Doors[tunnel.DoorHTTPS].Failed(0)
	c.Doors[tunnel.DoorUDP].Ended(0, errors.New("odd"))
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	series := 0
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			series++
			got[name] = m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	if want := len(tunnel.Doors()) * (1 + 2 + len(tunnel.Codes())); series != want {
		t.Errorf("%d series, want %d", series, want)
	}
	for name, want := range map[string]float64{
		"tunnel_door_callers_total tcp ok":            1,
		"tunnel_door_callers_total tcp no-such-node":  1,
		"tunnel_door_callers_total https bad-request": 1,
		"tunnel_door_callers_total udp internal":      1,
		"tunnel_door_callers_total egress ok":         0,
		"tunnel_door_open_duration_seconds tcp":       1,
		"tunnel_door_open_duration_seconds egress":    0,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v, %v; want %v", name, v, ok, want)
		}
	}
}
