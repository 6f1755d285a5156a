package egress

import (
	"sync"
	"time"
)

// apart keeps the target's first bytes away from our answer to the dial, for callers that
// are not ready for both at once: kube-apiserver takes what comes with the answer to a
// CONNECT for an error, and konnectivity-client loses what comes before it has noted the
// dial's answer. Who has said something since has read the answer.
type apart struct {
	answered time.Time // set before anything is written
	heard    chan struct{}
	once     sync.Once
}

// apartTime is how long to wait for a caller that says nothing.
const apartTime = 20 * time.Millisecond

func newApart() apart { return apart{heard: make(chan struct{})} }

// said notes that the caller has said something.
func (a *apart) said() { a.once.Do(func() { close(a.heard) }) }

// wait waits until the caller may be told more.
func (a *apart) wait() {
	left := apartTime - time.Since(a.answered)
	if left <= 0 {
		return
	}
	select {
	case <-a.heard:
	case <-time.After(left):
	}
}
