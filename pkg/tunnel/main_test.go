package tunnel

import (
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// testTimeout is how long a test waits for an event that must happen.
const testTimeout = time.Minute
