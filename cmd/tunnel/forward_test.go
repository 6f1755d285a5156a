package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
)

// If the file of forwards is written, the port opens, even if the disk may not have the file yet.
func TestForwardWithoutSync(t *testing.T) {
	metricFiles(t)
	text := strings.Replace(plainCloud, "socket =", "forwards = \"forwards.toml\"\nsocket =", 1)
	if err := os.WriteFile("cloud.toml", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := conf.LoadCloud("cloud.toml", environment())
	if err != nil {
		t.Fatal(err)
	}
	log, lines := testkit.NewLog()
	w, err := wireCloud(c, log, place{})
	if err != nil {
		t.Fatal(err)
	}
	r := newCloudReloader(w, "cloud.toml", nil, nil)
	r.syncFolder = func(string) error { return errors.New("input/output error") }
	port := testkit.FreeAddress(t)
	answer := httptest.NewRecorder()
	r.handlers()["POST /v1/forwards"].ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodPost,
		"/v1/forwards", strings.NewReader(`{"listen": "`+port+`", "target": "edge1/127.0.0.1:22"}`)))
	written, err := os.ReadFile("forwards.toml")
	if err != nil || !strings.Contains(string(written), port) {
		t.Fatalf("the file has %q: %v", written, err)
	}
	if all := r.listForwards(); answer.Code != http.StatusOK || len(all) != 1 || all[0].Listen != port {
		t.Errorf("status %d, %s; the ports are %v", answer.Code, answer.Body, all)
	}
	if got := lines.Lines("level=ERROR", "input/output error"); len(got) != 1 {
		t.Errorf("the log has\n%s", lines)
	}
}
