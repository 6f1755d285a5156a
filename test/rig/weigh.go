package rig

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// fetchTimeout bounds one question to a health port.
const fetchTimeout = 5 * time.Second

// fetch asks a health port. Whatever it answers is the text; the error says that it
// did not, or not with 200.
func fetch(health, path string) (string, error) { return fetchIn(nil, health, path) }

// fetchIn is fetch from within a network; nil is our own.
func fetchIn(n *Network, health, path string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+health+path, nil)
	if err != nil {
		return "", err
	}
	req.Close = true // a pooled connection would count as a descriptor over there
	transport := &http.Transport{DisableKeepAlives: true, DialContext: n.Dial}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: HTTP %d", path, resp.StatusCode)
	}
	return string(body), err
}

// Ready returns nil when the process behind a health port says that it is ready: for
// an edge, that it has a session.
func Ready(health string) error { return readyIn(nil, health) }

func readyIn(n *Network, health string) error {
	text, err := fetchIn(n, health, "/readyz?verbose")
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(text))
	}
	return nil
}

// Metrics returns the metrics that a health port shows, by name and labels.
func Metrics(health string) (map[string]float64, error) { return metricsIn(nil, health) }

func metricsIn(n *Network, health string) (map[string]float64, error) {
	text, err := fetchIn(n, health, "/metrics")
	if err != nil {
		return nil, err
	}
	values := make(map[string]float64)
	for line := range strings.SplitSeq(text, "\n") {
		at := strings.LastIndexByte(line, ' ') // a label may hold blanks
		if at < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		if v, err := strconv.ParseFloat(line[at+1:], 64); err == nil {
			values[line[:at]] = v
		}
	}
	return values, nil
}

// Descriptors returns how many files and sockets the process has open.
func (p *Process) Descriptors() (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.pid))
	return len(entries), err
}

// Memory is what a process holds in memory, in bytes (proc_pid_status(5)).
type Memory struct {
	Now  int64 // VmRSS
	Peak int64 // VmHWM
}

// Memory returns what the process holds in memory.
func (p *Process) Memory() (m Memory, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", p.pid))
	if err != nil {
		return m, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.Fields(s.Text())
		if len(fields) != 3 {
			continue
		}
		kib, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			continue
		}
		switch fields[0] {
		case "VmRSS:":
			m.Now = kib << 10
		case "VmHWM:":
			m.Peak = kib << 10
		}
	}
	if m.Now == 0 {
		return m, fmt.Errorf("/proc/%d/status has no VmRSS: the process has ended", p.pid)
	}
	return m, nil
}

// ResetPeak makes Memory's Peak start again from now (proc_pid_clear_refs(5)).
func (p *Process) ResetPeak() error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.pid), []byte("5"), 0)
}

// ticksPerSecond is the unit of times in /proc (USER_HZ), which is the same on all
// architectures that Go runs on.
const ticksPerSecond = 100

// CPU returns how much processor time the process has used (proc_pid_stat(5)).
func (p *Process) CPU() (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	if err != nil {
		return 0, err
	}
	// The name of the program, in parentheses, may hold anything. Behind it stand
	// state (3), …, utime (14) and stime (15).
	_, rest, ok := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat is not as expected: %s", p.pid, stat)
	}
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	system, err2 := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * time.Second / ticksPerSecond, errors.Join(err1, err2)
}
