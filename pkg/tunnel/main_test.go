package tunnel

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testTimeout is how long a test waits for an event that must happen.
const testTimeout = time.Minute
