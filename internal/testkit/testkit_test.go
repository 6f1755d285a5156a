package testkit

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// failing is a test that only records its failure.
type failing struct {
	testing.TB

	text string
}

func (*failing) Helper() {}

func (f *failing) Fatalf(format string, args ...any) {
	f.text = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// failureOf returns the text with which wait fails its test, or "".
func failureOf(wait func(t testing.TB)) string {
	f := new(failing)
	var wg sync.WaitGroup
	wg.Go(func() { wait(f) })
	wg.Wait()
	return f.text
}

func TestEventually(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started := time.Now()
		Eventually(t, "nine seconds pass", func() bool { return time.Since(started) >= 9*time.Second })
		if took := time.Since(started); took != 9*time.Second {
			t.Errorf("it took %s", took)
		}
		got := failureOf(func(t testing.TB) { Eventually(t, "pigs fly", func() bool { return false }) })
		if got != "not within 1m0s: pigs fly" {
			t.Errorf("failed with %q", got)
		}
	})
}

func TestWithin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started := time.Now()
		took := Within(t, time.Minute, "one second passes", func() error {
			if time.Since(started) < time.Second {
				return errors.New("not yet")
			}
			return nil
		})
		if took != time.Second {
			t.Errorf("it took %s", took)
		}
		tries := 0
		got := failureOf(func(t testing.TB) {
			Within(t, -time.Second, "pigs fly", func() error { tries++; return errors.New("no wings") })
		})
		if got != "not within -1s: pigs fly: no wings" || tries != 1 {
			t.Errorf("failed with %q after %d tries", got, tries)
		}
	})
}

func TestLog(t *testing.T) {
	log, text := NewLog()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() { log.Debug("hello", "i", i) })
	}
	wg.Wait()
	for i := range 4 {
		if want := fmt.Sprintf("level=DEBUG msg=hello i=%d\n", i); !strings.Contains(text.String(), want) {
			t.Errorf("%q lacks %q", text, want)
		}
	}
}
