// Package leaks makes the tests of a package fail if they leave goroutines.
package leaks

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Main runs the tests of a package, for TestMain. If they pass, and goroutines are left, it fails. On a busy machine,
// goroutines that the last test has told to end may take longer to do so than goleak.VerifyTestMain waits.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		err := goleak.Find()
		for end := time.Now().Add(time.Minute); err != nil && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
			err = goleak.Find()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "goroutines are left:", err)
			code = 1
		}
	}
	os.Exit(code)
}
