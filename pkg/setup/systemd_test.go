package setup

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
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
	u := &systemdUnit{service: cloudService(), program: packageProgram, dir: DefaultDir}
	if u.text() != cloudUnit {
		t.Errorf("without a low port, the unit is\n%s", u.text())
	}
	u.lowPort = true
	want := strings.Replace(cloudUnit, "\nCapabilityBoundingSet=\n",
		"\nCapabilityBoundingSet=CAP_NET_BIND_SERVICE\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n", 1)
	if u.text() != want || u.text() == cloudUnit {
		t.Errorf("the unit is\n%s", u.text())
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

// With the unit of a package, --systemd writes no other unit, but the drop-in that the service needs. Without one,
// it writes the unit, and no drop-in changes it.
func TestPackagedUnit(t *testing.T) {
	const dropIn = "tunnel-cloud.service.d/50-tunnel.conf"
	const usual, other = "/usr/bin/tunnel", "/opt/tunnel"
	start := func(program string) string { return "ExecStart=" + program + " cloud -c /etc/tunnel/cloud.toml\n" }
	whole := func(program string, lowPort bool) string {
		return (&systemdUnit{service: cloudService(), program: program, dir: DefaultDir, lowPort: lowPort}).text()
	}
	for name, tt := range map[string]struct {
		packaged string            // text of the package's unit; "": no package
		own      map[string]string // the operator's folder before
		program  string
		lowPort  bool
		want     map[string]string // the operator's folder afterwards; of a drop-in the settings alone
		notes    []string
	}{
		"no package": {
			"", nil, other, false,
			map[string]string{"tunnel-cloud.service": whole(other, false)}, nil,
		},
		"no package, low port": {
			"", map[string]string{"tunnel-cloud.service": "mine"}, usual, true,
			map[string]string{"tunnel-cloud.service": whole(usual, true), "tunnel-cloud.service.old": "mine"},
			[]string{"/tunnel-cloud.service was another unit, which is now "},
		},
		"no package, again": {
			"", map[string]string{"tunnel-cloud.service": whole(other, false)}, other, false,
			map[string]string{"tunnel-cloud.service": whole(other, false)}, nil,
		},
		"the package is gone": {
			"", map[string]string{dropIn: "[Service]\nx", "tunnel-cloud.service.d/override.conf": "mine"}, usual, false,
			map[string]string{
				"tunnel-cloud.service": whole(usual, false), "tunnel-cloud.service.d/override.conf": "mine",
			}, nil,
		},
		"a package": {cloudUnit, nil, usual, false, map[string]string{}, []string{"the package's: "}},
		"a newer package": {
			"[Service]\n" + start(usual) + "New=yes\n", nil, usual, false, map[string]string{},
			[]string{"the package's: "},
		},
		"a package and another program": {
			cloudUnit, nil, other, false, map[string]string{dropIn: "ExecStart=\n" + start(other)},
			[]string{"the package's: ", dropIn},
		},
		"a package and a low port": {
			cloudUnit, nil, usual, true,
			map[string]string{
				dropIn: "CapabilityBoundingSet=CAP_NET_BIND_SERVICE\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n",
			},
			[]string{"the package's: ", dropIn},
		},
		"a package and a drop-in that is needed no more": {
			cloudUnit, map[string]string{dropIn: "[Service]\nx", "tunnel-cloud.service.d/override.conf": "mine"}, usual, false,
			map[string]string{"tunnel-cloud.service.d/override.conf": "mine"}, []string{"the package's: "},
		},
		"a package that a unit hides": {
			cloudUnit, map[string]string{"tunnel-cloud.service": "mine"}, usual, false,
			map[string]string{"tunnel-cloud.service.old": "mine"},
			[]string{"the package's: ", "/tunnel-cloud.service hid the package's unit"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			own, empty, packages := t.TempDir(), t.TempDir(), t.TempDir()
			for name, text := range tt.own {
				put(t, filepath.Join(own, name), text)
			}
			if tt.packaged != "" {
				put(t, filepath.Join(packages, "tunnel-cloud.service"), tt.packaged)
			}
			u := &systemdUnit{service: cloudService(), program: tt.program, dir: DefaultDir, lowPort: tt.lowPort}
			if err := u.write(unitFolders{own, []string{empty, packages}}); err != nil {
				t.Fatal(err)
			}
			got := make(map[string]string)
			for _, pattern := range []string{"*.*", "*.d/*"} {
				paths, err := filepath.Glob(filepath.Join(own, pattern))
				if err != nil {
					t.Fatal(err)
				}
				for _, path := range paths {
					if text, err := os.ReadFile(path); err == nil { // no folder
						got[strings.TrimPrefix(path, own+"/")] = string(text)
					}
				}
			}
			if settings, ok := got[dropIn]; ok {
				got[dropIn] = settingsOf(t, settings)
			}
			if !maps.Equal(got, tt.want) {
				t.Errorf("the folder holds\n%q, want\n%q", got, tt.want)
			}
			said := u.running()[1:]
			if len(said) != len(tt.notes) {
				t.Fatalf("an operator reads %q, want %q", said, tt.notes)
			}
			for i, want := range tt.notes {
				if !strings.Contains(said[i], want) {
					t.Errorf("an operator reads %q, want %q", said[i], want)
				}
			}
		})
	}
}

// A service that ends at once does not run, although systemctl restart has succeeded.
func TestRestart(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("systemctl is a shell script here")
	}
	for name, tt := range map[string]struct {
		isActive string // what systemctl is-active does
		want     string // "": restart succeeds
	}{
		"runs":             {"echo active", ""},
		"ends again":       {"echo activating; exit 3", "tunnel-edge was started and does not run: systemd says activating"},
		"no answer":        {"exit 1", "systemctl is-active tunnel-edge: exit status 1"},
		"nothing to start": {"echo failed; exit 3", "systemd says failed"},
	} {
		t.Run(name, func(t *testing.T) {
			systemctl := filepath.Join(t.TempDir(), "systemctl")
			script := "#!/bin/sh\n[ $1 = is-active ] || exit 0\n" + tt.isActive + "\n"
			if err := os.WriteFile(systemctl, []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			u := &systemdUnit{service: edgeService(), systemctl: systemctl, settle: time.Millisecond}
			err := u.restart(t.Context())
			if tt.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			failed, ok := errors.AsType[*stepError](err)
			if !ok || !strings.Contains(failed.Error(), tt.want) || !strings.Contains(failed.fix, "journalctl -u tunnel-edge") {
				t.Errorf("%+v, want %q", err, tt.want)
			}
		})
	}
}

// settingsOf returns the settings of a drop-in, which are of the service, without its comments.
func settingsOf(t *testing.T, dropIn string) string {
	t.Helper()
	head, settings, ok := strings.Cut(dropIn, "[Service]\n")
	if !ok || strings.Trim(head, "# ") == "" {
		t.Errorf("the drop-in is\n%s", dropIn)
	}
	var b strings.Builder
	for line := range strings.Lines(settings) {
		if !strings.HasPrefix(line, "#") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// put writes a file and its folder.
func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), publicFile); err != nil {
		t.Fatal(err)
	}
}
