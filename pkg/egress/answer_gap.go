package egress

import (
	"sync"
	"time"
)

// answerGap delays the target's first bytes after our answer to a dial. Two callers cannot receive both
// at once:
//
//   - kube-apiserver takes bytes that come together with the answer to a CONNECT for an error.
//   - konnectivity-client loses bytes that come before it has recorded the answer.
//
// A caller that has sent something after the answer has read the answer, which ends the delay.
type answerGap struct {
	answered time.Time // set before anything is written
	heard    chan struct{}
	once     sync.Once // closes heard
}

// answerGapTime is how long to wait for a caller that sends nothing.
const answerGapTime = 20 * time.Millisecond

func newAnswerGap() answerGap { return answerGap{heard: make(chan struct{})} }

// callerSpoke notes that the caller has sent something.
func (g *answerGap) callerSpoke() { g.once.Do(func() { close(g.heard) }) }

// wait blocks until bytes of the target may be written to the caller.
func (g *answerGap) wait() {
	left := answerGapTime - time.Since(g.answered)
	if left <= 0 {
		return
	}
	select {
	case <-g.heard:
	case <-time.After(left):
	}
}
