package conn

import (
	"math/rand/v2"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// patience is how long a test waits for what must happen.
const patience = 10 * time.Second

// bubble is synctest.Test on one processor: where two run timers of a bubble at once, Go 1.26's
// race detector crashes (runtime's timer.unlockAndRun has one race context for all of them).
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	synctest.Test(t, test)
}

func blob(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	rand.NewChaCha8(seed).Read(b)
	return b
}
