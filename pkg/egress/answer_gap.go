package egress

import (
	"sync"
	"time"
)

// answerGap delays the target's first bytes after our answer to a dial. Two kinds of callers cannot
// receive the answer and the first bytes at the same time:
//
//   - kube-apiserver takes bytes that come together with the answer to a CONNECT for an error.
//   - konnectivity-client loses bytes that come before it has recorded the answer.
//
// A caller that has sent something after the answer has read the answer, which ends the delay.
type answerGap struct {
	answered   time.Time     // when the answer was written; set before the target's first bytes are
	callerRead chan struct{} // closed when the caller has sent something after the answer; nothing is sent
	once       sync.Once     // closes callerRead
}

// answerGapTime is how long the target's first bytes wait if the caller sends nothing.
const answerGapTime = 20 * time.Millisecond

func newAnswerGap() answerGap { return answerGap{callerRead: make(chan struct{})} }

// callerSent notes that the caller has sent something.
func (g *answerGap) callerSent() { g.once.Do(func() { close(g.callerRead) }) }

// wait blocks until bytes of the target may be written to the caller.
func (g *answerGap) wait() {
	left := answerGapTime - time.Since(g.answered)
	if left <= 0 {
		return
	}
	select {
	case <-g.callerRead:
	case <-time.After(left):
	}
}
