package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/services/relay"
	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A daemon that hangs keeps no command waiting. A command that waits for longer than the test may take has no deadline.
func TestSilentSocket(t *testing.T) {
	_, path := listenSocket(t) // the kernel accepts connections, and nobody answers
	t.Cleanup(func() { limited = context.WithTimeout })
	for line, want := range map[string]time.Duration{
		"restart":                               74 * time.Second,
		"drain":                                 45 * time.Second,
		"drain --stop":                          45 * time.Second,
		"reload":                                reloadTimeout,
		"forward ls":                            reloadTimeout,
		"forward rm 127.0.0.1:1":                reloadTimeout,
		"forward add 127.0.0.1:1 edge1/[::1]:1": reloadTimeout,
		"ls":                                    askTimeout,
		"forget edge1":                          askTimeout,
		"status":                                askTimeout,
		"status --all":                          askTimeout,
		"top":                                   askTimeout,
		"services ls":                           askTimeout,
		"services explain shop/web":             askTimeout,
		"cert status":                           askTimeout,
		"cert renew --all":                      askTimeout,
		"cert renew":                            renewTimeout,
		"ping edge1":                            pingTimeout,
		"ping edge1 127.0.0.1:22":               pingTimeout,
		"trace edge1 127.0.0.1:22":              traceTimeout,
	} {
		var waited time.Duration
		limited = func(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
			waited = d
			return context.WithTimeout(ctx, 20*time.Millisecond)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // as Ctrl-C
		var out, errs bytes.Buffer
		code := run(ctx, append(strings.Fields(line), "--socket", path), &out, &errs)
		stopped := ctx.Err() != nil
		cancel()
		text := "tunnel: the process does not answer on " + path + " in time"
		if stopped || waited != want || code != exitRuntime || !strings.HasPrefix(errs.String(), text) || out.Len() > 0 {
			t.Errorf("%s waits for %s, want %s; stopped: %t; exit code %d:\n%s%s",
				line, waited, want, stopped, code, &out, &errs)
		}
	}
	// What a command waits for is shorter than its own time: otherwise the daemon could not say why it fails.
	if daemon := busyTime + startTime + time.Second + 2*moveTime + systemdTime; restartTimeout <= daemon {
		t.Errorf("restart waits for %s, and the old process for %s", restartTimeout, daemon)
	}
}

// escape clears a terminal.
const escape = "\x1b[2J"

// escapes sets every string below v to escape, gives each list and map an element, and sets each bool to yes.
func escapes(v reflect.Value, yes bool) {
	if v.Type() == reflect.TypeFor[time.Time]() {
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(escape)
	case reflect.Bool:
		v.SetBool(yes)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				escapes(v.Field(i), yes)
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		escapes(v.Elem(), yes)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 { // JSON
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		escapes(v.Index(0), yes)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, elem := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		escapes(key, yes)
		escapes(elem, yes)
		v.SetMapIndex(key, elem)
	}
}

// Root runs the commands, and another program may serve the socket: none of its texts moves the cursor of the terminal.
func TestSocketCannotWriteToTheTerminal(t *testing.T) {
	t.Chdir(t.TempDir())
	var mode string // of the daemon
	var yes bool
	answers := func(v any) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			v := reflect.New(reflect.TypeOf(v))
			escapes(v.Elem(), yes)
			if status, ok := v.Interface().(*api.Status); ok {
				status.Mode = mode
			}
			if list, ok := v.Interface().(*api.NodeList); ok {
				list.Nodes = append(list.Nodes, list.Nodes[0], list.Nodes[0])
				list.Nodes[0].State, list.Nodes[1].State = api.Connected, api.Missing
			}
			api.Answer(w, v.Interface())
		})
	}
	answering := edgeSocket(t, map[string]http.Handler{
		"GET /v1/nodes":               answers(api.NodeList{}),
		"DELETE /v1/nodes/{node}":     answers(api.Forgotten{}),
		"GET /v1/status":              answers(api.Status{}),
		"GET /v1/statuses":            answers(api.StatusList{}),
		"POST /v1/ping":               answers(api.Pinged{}),
		"POST /v1/trace":              answers(api.Traced{}),
		"GET /v1/certificates":        answers(api.CertificateList{}),
		"POST /v1/certificates/renew": answers(api.RenewAnswer{}),
		"POST /v1/restart":            answers(restarted{}),
		"POST /v1/drain":              answers(drained{}),
		"POST /v1/reload":             answers(reloaded{}),
		"GET /v1/forwards":            answers(forwards{}),
		"POST /v1/forwards":           answers(reloaded{}),
		"DELETE /v1/forwards":         answers(reloaded{}),
		"GET /v1/services":            answers(relay.List{}),
		"GET /v1/services/shop/web":   answers(relay.List{}),
		"GET /v1/services/watch":      answers(relay.Line{}),
		"GET /v1/tap":                 answers(tap.Line{}),
	})
	renewing := edgeSocket(t, map[string]http.Handler{"POST /v1/certificates/renew": answers(api.CertificateList{})})
	refusing := edgeSocket(t, map[string]http.Handler{
		"/": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			api.Refuse(w, http.StatusBadGateway, escape, errors.New(escape+"\n"+escape))
		}),
	})
	breaking := edgeSocket(t, map[string]http.Handler{
		"/": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
				fmt.Fprintf(conn, "HTTP/1.1 500 %s\r\n\r\n", escape)
				conn.Close()
			}
		}),
	})
	lines := []string{
		"ls", "forget edge1", "status", "status --all", "ping edge1 -n 1", "ping edge1 127.0.0.1:22 -n 1",
		"trace edge1 127.0.0.1:22", "cert status", "cert renew", "cert renew edge1", "restart", "drain", "reload",
		"forward ls", "forward add 127.0.0.1:1 edge1/127.0.0.1:1", "forward rm 127.0.0.1:1", "services ls",
		"services explain shop/web", "services watch", "tap", "top --once --interval 100ms",
		"__complete ping", "__complete forward rm",
	}
	try := func(socket, line string) {
		var out, errs bytes.Buffer
		args := append(strings.Fields(line), "--socket", socket)
		if args[0] == "__complete" {
			args = append(args, "")
		}
		run(t.Context(), args, &out, &errs)
		if text := out.String() + errs.String(); strings.Contains(text, "\x1b") || text == "" {
			t.Errorf("tunnel %s prints %q", line, text)
		}
	}
	for _, yes = range []bool{false, true} {
		for _, mode = range []string{"cloud", "edge", escape} {
			for _, line := range lines {
				try(answering, line)
				if !strings.HasPrefix(line, "__complete") && !strings.HasPrefix(line, "forget") {
					try(answering, line+" -o json")
				}
			}
		}
		try(answering, "status -o wide")
		try(answering, "ls -o wide")
		try(answering, "top --once --interval 100ms -o wide")
		try(renewing, "cert renew")
	}
	for _, line := range append(lines, "diag -f refused.zip") {
		try(refusing, line)
	}
	for _, line := range append(lines, "diag -f broken.zip") {
		try(breaking, line)
	}
	file := filepath.Join(t.TempDir(), "cloud.toml")
	text := "[mode.cloud.stream.server]\ngrpcport = 9000\ntokenfile = \"tokens\"\n[mode.cloud.admin]\nsocket = "
	err := errors.Join(os.WriteFile(file, []byte(text+"\""+refusing+"\"\n"), 0o600),
		os.WriteFile(filepath.Join(filepath.Dir(file), "tokens"), nil, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	if code, out, errs := says(t, "token", "revoke", "-c", file, "--node", "edge1"); strings.Contains(out, "\x1b") ||
		!strings.Contains(out, tunnel.Printable(escape)) {
		t.Errorf("revoke: exit code %d, %q, %q", code, out, errs)
	}
}
