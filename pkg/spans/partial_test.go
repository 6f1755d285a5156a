package spans

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// partial says {partial_success: {rejected_spans: 2, error_message: "no"}}.
const partial = "\x0a\x06\x08\x02\x12\x02no"

// Spans that a collector rejects within a batch that it takes are lost, and the log says so once.
func TestCollectorTakesPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, c, tracer, log := newExporter(t)
		c.answer = func(context.Context) (int, error) { return http.StatusOK, nil }
		c.says = partial
		for range 2 {
			for range 5 {
				tracer.Begin(nil).End(tunnel.Event{Result: tunnel.ResultOK})
			}
			time.Sleep(2 * gatherTime)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if e.sent.Load() != 6 || e.lost.Load() != 4 || len(log.Lines("rejected some spans")) != 1 {
			t.Errorf("%d sent, %d lost: %v", e.sent.Load(), e.lost.Load(), log)
		}
	})
}

// A collector may answer anything: also another message, and text.
func FuzzRejectedBy(f *testing.F) {
	const most = 512
	for answer, want := range map[string]int{
		"": 0, partial: 2, partial[:4]: 0, "{}": 0, "<html>": 0, "OK\n": 0,
		"\x0a\x02\x12\x00": 0, "\x0a\x00": 0, "\x08\x02": 0, "\x0a\x03\x08\xff\x7f": most,
	} {
		if got := rejectedBy([]byte(answer), most); got != want {
			f.Errorf("%q: %d, want %d", answer, got, want)
		}
		f.Add(answer)
	}
	f.Fuzz(func(t *testing.T, answer string) {
		if n := rejectedBy([]byte(answer), most); n < 0 || n > most {
			t.Errorf("%q: %d", answer, n)
		}
	})
}
