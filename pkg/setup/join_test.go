package setup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
)

func newJoinToken() auth.JoinToken {
	return auth.JoinToken{Address: "127.0.0.1:9", ServerName: "cloud", Node: "edge1", Secret: auth.NewToken()}
}

// Whatever a terminal or a program adds around a token does not count. No error repeats what
// was read.
func TestReadJoinToken(t *testing.T) {
	token := newJoinToken()
	text := token.Encode().Reveal()
	for name, tt := range map[string]struct {
		in  string
		err string // "": the token
	}{
		"a line":               {text + "\n", ""},
		"no end of line":       {text, ""},
		"blanks and CRLF":      {"  " + text + " \r\n", ""},
		"quotes":               {"'" + text + "'\n", ""},
		"more lines":           {text + "\nexit\n", ""},
		"nothing":              {"", "no token on standard input"},
		"an empty line first":  {"\n" + text, "no token on standard input"},
		"the whole command":    {"echo '" + text + "' | sudo tunnel join\n", "no join token"},
		"half of it":           {text[:len(text)/2] + "\n", "damaged"},
		"more than is read":    {text + strings.Repeat("A", 1<<20), "allowed"},
		"an endless bad token": {strings.Repeat("A", 1<<20), "allowed"},
	} {
		got, err := ReadJoinToken(t.Context(), strings.NewReader(tt.in), io.Discard, "")
		switch {
		case tt.err == "" && (err != nil || got != token):
			t.Errorf("%s: %v", name, err)
		case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
			t.Errorf("%s: %v, want %q", name, err, tt.err)
		case err != nil && strings.Contains(err.Error(), text[8:20]):
			t.Errorf("%s: the error repeats the token: %v", name, err)
		}
	}
}

// A writer that keeps its end of the pipe open is not waited for after a line, and an interrupt
// ends the wait for a line.
func TestReadJoinTokenFromAPipe(t *testing.T) {
	token := newJoinToken()
	in, out := io.Pipe()
	go io.WriteString(out, token.Encode().Reveal()+"\n")
	if got, err := ReadJoinToken(t.Context(), in, io.Discard, ""); err != nil || got != token {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := ReadJoinToken(ctx, in, io.Discard, ""); !errors.Is(err, ErrInterrupted) {
		t.Error(err)
	}
	out.Close()
}

// What the cloud answers decides whether another attempt makes sense: exit codes 4 and 1.
func TestRefusedToken(t *testing.T) {
	for code, want := range map[codes.Code]struct {
		kind Kind
		text string
	}{
		codes.Unauthenticated:    {KindRefused, "does not accept it for node edge1"},
		codes.PermissionDenied:   {KindRefused, "the cloud refused: because"},
		codes.Unimplemented:      {KindRefused, "the cloud refused: because"},
		codes.InvalidArgument:    {KindRefused, "the cloud refused: because"},
		codes.Unavailable:        {KindFailed, "could not answer now: because"},
		codes.DeadlineExceeded:   {KindFailed, "could not answer now: because"},
		codes.Internal:           {KindFailed, "could not answer now: because"},
		codes.ResourceExhausted:  {KindFailed, "the cloud is busy: because"},
		codes.Unknown:            {KindFailed, "could not answer now: because"},
		codes.Canceled:           {KindFailed, "could not answer now: because"},
		codes.FailedPrecondition: {KindRefused, "the cloud refused: because"},
	} {
		err := refusedToken(newJoinToken(), fmt.Errorf("joining: %w", status.Error(code, "because")))
		failed, ok := errors.AsType[*stepError](err)
		if !ok || failed.step != "token" || failed.kind != want.kind || failed.fix == "" ||
			!strings.Contains(err.Error(), want.text) {
			t.Errorf("%s: %+v, want kind %d and %q", code, err, want.kind, want.text)
		}
	}
	// No answer at all.
	failed, ok := errors.AsType[*stepError](refusedToken(newJoinToken(), io.ErrUnexpectedEOF))
	if !ok || failed.kind != KindFailed || !strings.Contains(failed.Error(), "unexpected EOF") {
		t.Errorf("no answer: %+v", failed)
	}
}

// The first join was without systemd. The second one moves the certificate, and changes one line
// of edge.toml; if an operator has written that line another way, Join says what to change.
func TestMoveCertificate(t *testing.T) {
	dir := t.TempDir()
	f := &nodeFiles{
		dir: dir, certPath: filepath.Join(stateDir, certFile), keep: true, moveFrom: filepath.Join(dir, certFile),
	}
	moved := `nodecert = "` + f.certPath + `"`
	for text, want := range map[string]string{
		"# mine\nnodecert = \"node.pem\"\nlogport = 1\n":       "# mine\n" + moved + "\nlogport = 1\n",
		"nodecert = 'node.pem'\n":                              "",
		"nodecert=\"node.pem\"\n":                              "",
		"# nodecert = \"node.pem\"\nnodecert = \"node.pem\"\n": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, edgeFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := f.config(new(way))
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%q becomes %q, %v; want %q", text, got, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), "write "+moved) {
			t.Errorf("%v\ndoes not say what to write", err)
		}
	}
}

// A unit sees neither homes nor temporary folders.
func TestHidden(t *testing.T) {
	for path, want := range map[string]bool{
		"/home/me/tunnel": true, "/root": true, "/root/tunnel": true, "/tmp": true, "/tmp/x": true, "/var/tmp/x": true,
		"/run/user/0/x": true, "/usr/local/bin/tunnel": false, "/etc/tunnel": false, "/homes/x": false, "/var/tmpfile": false,
		"/srv/tmp/x": false,
	} {
		if hidden(path) != want {
			t.Errorf("%s is hidden: %t, want %t", path, !want, want)
		}
	}
}

// A token for several nodes is used by the name of the machine, if the token permits it.
func TestForNode(t *testing.T) {
	one, several := newJoinToken(), newJoinToken()
	several.Node, several.Nodes = "", "edge-*"
	host := conf.Env{HostName: "EDGE-7"}
	for _, tc := range []struct {
		token auth.JoinToken
		name  string
		env   conf.Env
		want  string // "": an error
	}{
		{one, "", host, string(one.Node)},
		{one, string(one.Node), host, string(one.Node)},
		{one, "other", host, ""},
		{several, "", host, "edge-7"},
		{several, "", conf.Env{NodeName: "edge-8", HostName: "EDGE-7"}, "edge-8"},
		{several, "edge-9", host, "edge-9"},
		{several, "other", host, ""},
		{several, "", conf.Env{HostName: "other"}, ""},
		{several, "", conf.Env{}, ""},
		{several, "edge-a.b", host, ""},
	} {
		got, err := ForNode(tc.token, tc.name, tc.env)
		switch {
		case tc.want == "" && err == nil:
			t.Errorf("%q, %+v: %+v", tc.name, tc.env, got)
		case tc.want != "" && (err != nil || string(got.Node) != tc.want || got.Nodes != ""):
			t.Errorf("%q, %+v: %+v, %v; want %s", tc.name, tc.env, got, err, tc.want)
		}
	}
}
