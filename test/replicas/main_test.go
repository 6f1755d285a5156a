package replicas

import (
	"flag"
	"os"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig/rigtest"
)

// The promises, with what they are counted from.
const (
	// readyWithin is from a start to the first session of everybody.
	readyWithin = 12 * time.Second
	// noticeWithin is from a peer that is silent to its being known.
	noticeWithin = 15 * time.Second
	// healWithin is from the end of a partition to the replicas knowing each other: a
	// connection that was being tried may have to be given up, and a pause pass.
	healWithin = 22 * time.Second
	// atOnce is for what happens without waiting for anything, on a machine that is
	// busy with other things.
	atOnce = 10 * time.Second
	// poll is how often a condition is looked at.
	poll = 50 * time.Millisecond
)

// program is the program under test.
var program string

// programKey is where a test that runs itself again finds the program.
const programKey = "TUNNEL_TEST_PROGRAM"

func TestMain(m *testing.M) {
	flag.Parse()
	rigtest.Parallel(8)
	if program = os.Getenv(programKey); program != "" {
		os.Exit(m.Run())
	}
	os.Exit(rigtest.Main(m, &program))
}

// soak reports whether the long variant was asked for.
func soak() bool { return os.Getenv("TUNNEL_SOAK") == "1" }

// beside lets other tests run beside this one, which mostly waits. What the long
// variant measures is not disturbed.
func beside(t *testing.T) {
	if !soak() {
		t.Parallel()
	}
}
