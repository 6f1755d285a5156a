package main

import (
	"log/slog"
	"os"
	"strings"
	"testing"

	"tunnel.example/tunnel/conf"
)

// The kernel is asked at the start whether it has the congestion control that the configuration names.
func TestCongestionAtStart(t *testing.T) {
	metricFiles(t)
	for name, wire := range map[string]func(setting string) (*daemon, error){
		"mode.cloud.stream.server": func(setting string) (*daemon, error) {
			text := strings.Replace(plainCloud, "grpcport", setting+"\ngrpcport", 1)
			if err := os.WriteFile("cloud.toml", []byte(text), 0o600); err != nil {
				return nil, err
			}
			c, err := conf.LoadCloud("cloud.toml", conf.Env{HostName: "cloud"})
			if err != nil {
				return nil, err
			}
			return newCloud(c, slog.New(slog.DiscardHandler))
		},
		"mode.edge.stream.client": func(setting string) (*daemon, error) {
			if err := os.WriteFile("edge.toml", []byte(plainEdge+setting), 0o600); err != nil {
				return nil, err
			}
			e, err := conf.LoadEdge("edge.toml", conf.Env{})
			if err != nil {
				return nil, err
			}
			return newEdge(e, slog.New(slog.DiscardHandler))
		},
	} {
		_, err := wire(`congestion = "nosuch"`)
		if want := name + ": congestion: this kernel has no nosuch"; err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("the error is %v, want %s", err, want)
		}
		for setting, want := range map[string]string{
			`congestion = "reno"`: "every connection has reno", `congestion = "system"`: "the system's choice",
		} {
			d, err := wire(setting)
			if err != nil {
				t.Errorf("%s: %s: %v", name, setting, err)
				continue
			}
			got := ""
			for _, c := range d.checks {
				if c.Name == "congestion" {
					got = c.Status()
				}
			}
			if got != want {
				t.Errorf("%s: %s: the line of /readyz is %q, want %q", name, setting, got, want)
			}
		}
	}
}
