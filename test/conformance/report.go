package conformance

import (
	"bufio"
	"encoding/xml"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A State is what became of a test.
type State string

// The states that the table distinguishes. ginkgo's other ones (timedout, panicked, interrupted, aborted) are Failed.
const (
	Passed  State = "passed"
	Failed  State = "failed"
	Skipped State = "skipped" // by the test itself: the cluster lacks what the test needs
)

// A Result is one test of one run.
type Result struct {
	Test    string // such as "[sig-cli] Kubectl client Simple pod should support exec"
	State   State
	Message string // of a failure, or why a test was skipped
	Took    time.Duration
}

// The parts of a JUnit report that ginkgo writes (ginkgo/v2/reporters/junit_report.go).
type (
	junitReport struct {
		Suites []struct {
			Cases []junitCase `xml:"testcase"`
		} `xml:"testsuite"`
	}
	junitCase struct {
		Name    string        `xml:"name,attr"`
		Status  string        `xml:"status,attr"`
		Seconds float64       `xml:"time,attr"`
		Skipped *junitMessage `xml:"skipped"`
		Failure *junitMessage `xml:"failure"`
		Error   *junitMessage `xml:"error"`
	}
	junitMessage struct {
		Text string `xml:"message,attr"`
	}
)

// notSelected is what ginkgo says of a test that the focus leaves out.
const notSelected = "skipped"

// ReadJUnit reads a report of ginkgo. Nodes that are no tests (BeforeSuite) and tests that the focus left out are not
// in the results; a failure of BeforeSuite is an error.
func ReadJUnit(r io.Reader) ([]Result, error) {
	var report junitReport
	if err := xml.NewDecoder(r).Decode(&report); err != nil {
		return nil, fmt.Errorf("reading a JUnit report: %w", err)
	}
	var results []Result
	for _, s := range report.Suites {
		for _, c := range s.Cases {
			result, isTest, err := c.result()
			if err != nil {
				return nil, err
			}
			if isTest {
				results = append(results, result)
			}
		}
	}
	slices.SortFunc(results, func(a, b Result) int { return strings.Compare(a.Test, b.Test) })
	return results, nil
}

func (c junitCase) result() (r Result, isTest bool, err error) {
	var message string
	for _, m := range []*junitMessage{c.Failure, c.Error, c.Skipped} {
		if m != nil {
			message = m.Text
			break
		}
	}
	name, isTest := strings.CutPrefix(c.Name, "[It] ")
	if !isTest {
		if strings.Contains(c.Name, "BeforeSuite") && c.Status != string(Passed) {
			return r, false, fmt.Errorf("%s: %s: %s", c.Name, c.Status, message)
		}
		return r, false, nil
	}
	r = Result{Test: withoutLabels(name), Message: message, Took: time.Duration(c.Seconds * float64(time.Second))}
	switch c.Status {
	case string(Passed):
		r.State = Passed
	case string(Skipped), "pending":
		if message == notSelected {
			return r, false, nil
		}
		r.State = Skipped
	case string(Failed):
		r.State = Failed
	default:
		r.State = Failed
		r.Message = c.Status + ": " + message
	}
	return r, true, nil
}

var labels = regexp.MustCompile(`(?: \[[^\[\]]*\])+$`)

// withoutLabels removes the labels that ginkgo and Kubernetes put behind a test's name: "[Conformance]",
// "[sig-cli, Conformance]". They differ between ways to list tests, and between versions.
func withoutLabels(name string) string {
	return strings.TrimSpace(labels.ReplaceAllString(name, ""))
}

var listed = regexp.MustCompile(`^\s+\S+\.go:\d+: (.*)$`)

// ReadList reads the names that `e2e.test --list-tests` prints.
func ReadList(r io.Reader) ([]string, error) {
	var tests []string
	s := bufio.NewScanner(r)
	for s.Scan() {
		if m := listed.FindStringSubmatch(s.Text()); m != nil {
			tests = append(tests, withoutLabels(m[1]))
		}
	}
	return tests, s.Err()
}
