package stream

import (
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// An edge with sessions = "all" whose address never leads to another replica says so once, and no longer dials every
// few seconds.
func TestAfterSecond(t *testing.T) {
	log, lines := testkit.NewLog()
	c := &Client{cfg: ClientConfig{All: true}, log: log, replicas: []string{"a", "b"}}
	const d, many = 3 * time.Second, 2 * manySeconds
	for n, want := range map[int]time.Duration{
		1: d, many - 1: d, many + 1: 20 * time.Second, many + 2: 40 * time.Second, 1000: secondMax,
	} {
		if got := c.afterSecond(n, d); got != want {
			t.Errorf("after %d refusals: %s, want %s", n, got, want)
		}
	}
	if got := lines.Lines("sessionAffinity"); len(got) > 0 {
		t.Errorf("too early: %q", got)
	}
	c.afterSecond(many, d)
	if got := lines.Lines("INFO", "sessionAffinity"); len(got) != 1 {
		t.Errorf("the log has %q", got)
	}
	c.links = append(c.links, &link{moving: true})
	if got := c.afterSecond(1000, d); got != d {
		t.Errorf("while its only replica stops, the edge waits %s, want %s", got, d)
	}
}
