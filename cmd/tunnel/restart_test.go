package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/takeover"
	"tunnel.example/tunnel/pkg/tunnel"
)

// An upgrade of a package restarts a service that tunnel restart cannot ask. A service whose configuration has a
// problem, or whose new program does not start, goes on with the old program.
func TestPackagesRestart(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("packages are for Linux")
	}
	const exits4 = "# the new process has failed\n"
	const edge = "[mode.edge.stream.client]\nservername = \"a:9000\"\n"
	for name, tc := range map[string]struct {
		cloud string // cloud.toml; "": there is none
		want  string
	}{
		"no admin socket":        {"[mode.cloud.stream.server]\ngrpcport = 9000\n", "try-restart tunnel-cloud.service\n"},
		"nothing listens":        {"[mode.cloud.admin]\nsocket = \"silent.sock\"\n", "try-restart tunnel-cloud.service\n"},
		"neither cloud nor edge": {"\n", "try-restart tunnel-cloud.service\n"},
		"no file":                {"", "try-restart tunnel-cloud.service\n"},
		"another mode":           {edge, "try-restart tunnel-cloud.service\n"},
		"a broken file":          {"x =\n", ""},
		"the new program fails":  {exits4, ""},
	} {
		for script, args := range map[string][]string{"deb/postinst": {"configure", "1.0"}, "rpm/post": {"2"}} {
			t.Run(name+" "+filepath.Dir(script), func(t *testing.T) {
				dir := t.TempDir()
				write := func(name, text string) {
					if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
						t.Fatal(err)
					}
				}
				if tc.cloud != "" {
					write("cloud.toml", tc.cloud)
				}
				write("systemctl", "#!/bin/sh\ncase $* in\n*is-active*edge*) exit 3;;\n"+
					"try-restart*) echo \"$*\" >>"+dir+"/did;;\nesac\n")
				if tc.cloud == exits4 {
					write("tunnel", "#!/bin/sh\nexit 4\n")
				} else {
					write("tunnel", "#!/bin/sh\n"+runMain+"=1 exec "+os.Args[0]+" \"$@\"\n")
				}
				text, err := os.ReadFile(filepath.Join("../../deployment/packages", script))
				if err != nil {
					t.Fatal(err)
				}
				write("script", strings.NewReplacer(
					"/usr/bin/tunnel", dir+"/tunnel", "/etc/tunnel", dir, "/run/systemd/system", dir).Replace(string(text)))
				cmd := exec.Command("sh", append([]string{filepath.Join(dir, "script")}, args...)...)
				cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
				output, err := cmd.CombinedOutput()
				did, _ := os.ReadFile(filepath.Join(dir, "did")) // there is none if nothing was done
				if err != nil || string(did) != tc.want {
					t.Errorf("the script did %q, want %q; %v:\n%s", did, tc.want, err, output)
				}
			})
		}
	}
}

// An edge that has moved first, and has no conns, still serves the callers that the old process has accepted last.
func TestOldSessionsOutlastCallers(t *testing.T) {
	if needed := firstTime + lastTime; stream.Overlap < needed+needed/10 {
		t.Errorf("an edge keeps its old session for %s; the old process needs it for %s", stream.Overlap, needed)
	}
}

// A restart is refused where systemd would take the end of the old process for the end of the service.
func TestUnknownChild(t *testing.T) {
	const pid, shell = 7, 3
	for _, tc := range []struct {
		env    map[string]string
		parent int
		want   string // part of the advice; "": a restart is permitted
	}{
		{map[string]string{"SYSTEMD_EXEC_PID": "7", "INVOCATION_ID": "a"}, 1, "NotifyAccess=main"},
		{map[string]string{"SYSTEMD_EXEC_PID": "7", "INVOCATION_ID": "a", "NOTIFY_SOCKET": "/n"}, 1, ""},
		{map[string]string{"SYSTEMD_EXEC_PID": "7"}, shell, "NotifyAccess=main"}, // of a user's systemd
		{map[string]string{"SYSTEMD_EXEC_PID": "3", "INVOCATION_ID": "a"}, 1, ""},
		{map[string]string{"INVOCATION_ID": "a"}, 1, "NotifyAccess=main"}, // systemd before version 248
		{map[string]string{"INVOCATION_ID": "a", "NOTIFY_SOCKET": "/n"}, 1, ""},
		{map[string]string{"INVOCATION_ID": "a"}, shell, ""},
		{map[string]string{"SYSTEMD_EXEC_PID": "3", "NOTIFY_SOCKET": "/n"}, shell, "write exec before it"}, // of a script
		{map[string]string{"NOTIFY_SOCKET": "/n"}, shell, ""},                                              // no systemd
		{nil, 1, ""},
	} {
		got := unitAdvice(func(key string) string { return tc.env[key] }, pid, tc.parent, "cloud")
		if !strings.Contains(got, tc.want) || (got == "") != (tc.want == "") {
			t.Errorf("%v with parent %d: %q, want %q", tc.env, tc.parent, got, tc.want)
		}
	}
}

// A process behind a script refuses. One that has taken over has the same variables, and is the main process.
func TestRestartBehindScript(t *testing.T) {
	t.Setenv("SYSTEMD_EXEC_PID", "1")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv(notifyVariable, filepath.Join(t.TempDir(), "none")) // a restart that is permitted fails there
	for before, want := range map[*takeover.Predecessor]string{
		nil:                       "write exec before it",
		new(takeover.Predecessor): "systemd cannot be notified",
	} {
		r := &restarter{daemon: &daemon{mode: "edge", place: place{before: before}}, reloader: new(reloader)}
		if _, err := r.restart(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the restart says %v, want %q", err, want)
		}
	}
}

// writes is a module that writes while ctx is not done.
type writes struct{ began, ended chan struct{} }

func (writes) Name() string { return "writes" }

func (w writes) Run(ctx context.Context) error {
	close(w.began)
	<-ctx.Done()
	close(w.ended)
	return nil
}

// Two processes never write at once: the old one stops when the new one serves. The rest of the old one goes on.
func TestOneWriter(t *testing.T) {
	sockets := listen.Inherit(nil)
	w := writes{make(chan struct{}), make(chan struct{})}
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan error, 1) // capacity 1: the daemon need not wait for the test
	go func() { over <- tunnel.Run(ctx, later{w, sockets}) }()
	if tunnel.IsClosed(w.began) {
		t.Error("it writes while the process before does")
	}
	sockets.Serve()
	testkit.Eventually(t, "it writes", func() bool { return tunnel.IsClosed(w.began) })
	sockets.Leave()
	testkit.Eventually(t, "it writes no more", func() bool { return tunnel.IsClosed(w.ended) })
	select {
	case err := <-over:
		t.Errorf("the daemon has ended: %v", err)
	default:
	}
	stop()
	if err := <-over; err != nil {
		t.Error(err)
	}
}
