package testkit

import "testing"

// A test that skips itself in a network of its own is skipped, not passed (test/skips.txt allows it).
func TestSkipInOwnNetwork(t *testing.T) {
	t.Run("child", func(t *testing.T) {
		t.Cleanup(func() {
			if !t.Skipped() {
				t.Error("the test has skipped itself in its own network, and passes here")
			}
		})
		if InOwnNetwork(t) {
			t.Skip("for the test")
		}
	})
}

func TestSkipped(t *testing.T) {
	for out, want := range map[string]bool{
		"=== RUN   TestX\n--- SKIP: TestX (0.00s)\nPASS\n":                                   true,
		"--- PASS: TestX (0.00s)\n":                                                          false,
		"--- PASS: TestX (0.00s)\n    --- SKIP: TestX/a (0.00s)\n":                           false,
		"--- SKIP: TestXY (0.00s)\n":                                                         false,
		"    x_test.go:7: it printed --- SKIP: TestX (0.00s)\n--- PASS: TestX (0.00s)\nok\n": false,
	} {
		if got := skipped([]byte(out), "TestX"); got != want {
			t.Errorf("skipped is %v for %q", got, out)
		}
	}
}
