package main

import "testing"

func TestTimeIsUp(t *testing.T) {
	for name, tt := range map[string]struct {
		out  string
		want bool
	}{
		"the toolchain's slip": {"fuzz: elapsed: 10s, execs: 5\n--- FAIL: FuzzX (10.07s)\n" +
			"    context deadline exceeded\nFAIL\nexit status 1\n", true},
		"a finding": {"--- FAIL: FuzzX (0.1s)\n    --- FAIL: FuzzX (0.00s)\n        x_test.go:9: bad\n" +
			"    Failing input written to testdata/fuzz/FuzzX/1\nFAIL\n", false},
		"a finding that says the same": {"--- FAIL: FuzzX (0.1s)\n    context deadline exceeded\nFAIL\n" +
			"    Failing input written to testdata/fuzz/FuzzX/1\n", false},
		"a build that fails": {"# x\nx.go:1: syntax error\nFAIL\n", false},
	} {
		if got := timeIsUp(tt.out); got != tt.want {
			t.Errorf("%s: %t, want %t", name, got, tt.want)
		}
	}
}
