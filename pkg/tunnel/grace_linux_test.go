package tunnel

import (
	"io"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// A conn does not end while a request waits in the socket for this process to read it.
func TestUnreadRequestIsNotQuiet(t *testing.T) {
	caller, src := tcpPair(t)
	dog := &watchdog{target: new(movingConn), check: time.AfterFunc(time.Hour, func() {})}
	dog.ends[0] = new(GraceEnd)
	dog.both = []*direction{newDirection(src, dog)}
	dog.ends[0].Begin(quietTime)
	quiet := func() bool {
		dog.quietSince = time.Now().Add(-time.Minute)
		_, quiet := dog.lookAgain()
		return quiet
	}
	if !quiet() {
		t.Error("a silent conn does not end")
	}
	if _, err := io.WriteString(caller, "request"); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the request keeps the conn", func() bool { return !quiet() })
	if _, err := io.ReadFull(src, make([]byte, len("request"))); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "without a request, the conn ends", quiet)
	dog.stop()
}
