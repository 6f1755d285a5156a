package setup

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// --systemd installs the same units as the packages, and can replace the paths in them.
func TestUnitsAreThoseOfTheDeployment(t *testing.T) {
	for state, s := range map[string]service{stateDir: edgeService(), cloudStateDir: cloudService()} {
		text, err := os.ReadFile("../../deployment/systemd/" + s.name() + ".service")
		if err != nil {
			t.Fatal(err)
		}
		if string(text) != s.unit {
			t.Errorf("pkg/setup/%s.service differs from deployment/systemd/%[1]s.service", s.name())
		}
		for _, what := range []string{
			"\nExecStart=/usr/bin/tunnel " + s.mode + " -c /etc/tunnel/" + s.mode + ".toml\n",
			"\n" + s.start(packageProgram, DefaultDir),
			"\nStateDirectory=" + strings.TrimPrefix(state, "/var/lib/") + "\n",
			"\nDynamicUser=yes\n",
			"\nCapabilityBoundingSet=\n",
			"\nTimeoutStopSec=40\n",
		} {
			if strings.Count(s.unit, what) != 1 {
				t.Errorf("the unit %s does not hold %q once", s.name(), what)
			}
		}
	}
}

// The cloud is as confined as the edge: the units differ only in what the two programs need.
func TestCloudUnitIsAsHardenedAsTheEdges(t *testing.T) {
	settings := func(s service) map[string]bool {
		all := make(map[string]bool)
		_, text, _ := strings.Cut(s.unit, "\n[Service]\n")
		for line := range strings.Lines(text) {
			if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
				all[line] = true
			}
		}
		return all
	}
	cloud := settings(cloudService())
	own := 0
	for line := range settings(edgeService()) {
		key, _, _ := strings.Cut(line, "=")
		if slices.Contains([]string{"ExecStart", "StateDirectory", "RuntimeDirectory", "LimitNOFILE"}, key) {
			own++
			continue
		}
		if !cloud[line] {
			t.Errorf("the unit of the cloud lacks %s", line)
		}
	}
	if own != 4 {
		t.Errorf("%d lines of the edge's unit name files and limits of its own, want 4", own)
	}
}

// Only a cloud on a port below 1024 gets the capability for such ports.
func TestBindLowPorts(t *testing.T) {
	u := &systemdUnit{service: cloudService(), text: cloudUnit}
	u.bindLowPorts()
	want := strings.Replace(cloudUnit, "\nCapabilityBoundingSet=\n",
		"\nCapabilityBoundingSet=CAP_NET_BIND_SERVICE\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n", 1)
	if u.text != want || u.text == cloudUnit {
		t.Errorf("the unit is\n%s", u.text)
	}
}

// Without systemd, --systemd fails before it changes anything, and says what to run.
func TestNoSystemd(t *testing.T) {
	if _, err := os.Stat(booted); err == nil {
		t.Setenv("PATH", t.TempDir()) // a machine that systemd runs, without systemctl
	}
	dir := filepath.Join(t.TempDir(), "cloud")
	_, err := newSystemdUnit(cloudService(), dir, Host{Sudo: true})
	failed, ok := errors.AsType[*stepError](err)
	if !ok || failed.step != "systemd" || !strings.Contains(failed.err.Error(), "here") &&
		!strings.Contains(failed.err.Error(), "systemd does not run this machine") {
		t.Fatalf("newSystemdUnit: %v", err)
	}
	if want := "sudo tunnel cloud -c " + dir + "/cloud.toml"; !strings.Contains(failed.fix, want) {
		t.Errorf("the advice %q lacks %q", failed.fix, want)
	}
	cfg := newInit(dir)
	cfg.Systemd = true
	if err = Init(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "Nothing was written") {
		t.Errorf("Init: %v", err)
	}
	if _, err = os.Stat(dir); err == nil {
		t.Error("Init has made the folder")
	}
}

// A unit of a package is used if it is the one that --systemd would write, and nothing replaces it.
func TestPackagedUnit(t *testing.T) {
	for name, tt := range map[string]struct {
		packages, etc string // texts of the two units; "": none
		want          bool
	}{
		"no package":                        {"", "", false},
		"the same unit":                     {"unit", "", true},
		"another program, such as in /opt":  {"other", "", false},
		"an operator's unit replaces it":    {"unit", "mine", false},
		"an earlier --systemd has replaced": {"unit", "unit", false},
	} {
		etc, empty, packages := t.TempDir(), t.TempDir(), t.TempDir()
		for dir, text := range map[string]string{etc: tt.etc, packages: tt.packages} {
			if text == "" {
				continue
			}
			if err := os.WriteFile(filepath.Join(dir, "tunnel-cloud.service"), []byte(text), publicFile); err != nil {
				t.Fatal(err)
			}
		}
		file := filepath.Join(etc, "tunnel-cloud.service")
		if got := packaged(file, "unit", []string{empty, packages}); got != tt.want {
			t.Errorf("%s: %t, want %t", name, got, tt.want)
		}
	}
}
