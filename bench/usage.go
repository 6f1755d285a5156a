package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// What the kernel knows of a way's ends. sshd has a process of its own for each session, so
// a process counts together with what it has started.

// cpu returns the processor time that both ends have used.
func (l *line) cpu() (time.Duration, error) {
	ticks := 0
	cloud, err1 := family(l.cloud)
	edge, err2 := family(l.edge)
	for _, s := range append(cloud, edge...) {
		ticks += s.ticks
	}
	const perSecond = 100 // USER_HZ, the same wherever Go runs
	return time.Duration(ticks) * time.Second / perSecond, errors.Join(err1, err2)
}

// memory returns what cloud and edge hold in memory, in bytes.
func (l *line) memory() (held [2]float64, err error) {
	for i, end := range []*rig.Process{l.cloud, l.edge} {
		processes, err := family(end)
		if err != nil {
			return held, err
		}
		for _, s := range processes {
			n, err := resident(s.pid)
			if err != nil {
				return held, err
			}
			held[i] += n
		}
	}
	return held, nil
}

// resident returns what a process holds in memory. The sum that /proc keeps at hand may be
// off by as much as a hundred conns weigh.
func resident(pid int) (float64, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) == 3 && fields[0] == "Rss:" {
			kib, err := strconv.Atoi(fields[1])
			return float64(kib << 10), err
		}
	}
	return 0, fmt.Errorf("process %d has no memory: it has ended", pid)
}

// stat is what we read of proc_pid_stat(5).
type stat struct{ pid, parent, ticks int }

// family returns a process, and those that it has started.
func family(of *rig.Process) ([]stat, error) {
	found, err := readStat(of.PID())
	if err != nil {
		return nil, err
	}
	family := []stat{found}
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range paths {
		pid, perr := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if perr != nil {
			continue
		}
		if s, serr := readStat(pid); serr == nil && s.parent == of.PID() { // others come and go
			family = append(family, s)
		}
	}
	return family, err
}

func readStat(pid int) (s stat, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return s, err
	}
	// The name of the program, in parentheses, may hold anything. Behind it stand
	// state (3), ppid (4), …, utime (14) and stime (15).
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < 13 {
		return s, fmt.Errorf("/proc/%d/stat is not as expected: %s", pid, text)
	}
	parent, err1 := strconv.Atoi(fields[1])
	user, err2 := strconv.Atoi(fields[11])
	system, err3 := strconv.Atoi(fields[12])
	return stat{pid, parent, user + system}, errors.Join(err1, err2, err3)
}

// headers is what IPv4, TCP and its timestamps take of each packet.
const headers = 20 + 20 + 12

var counter = regexp.MustCompile(`\b(bytes_sent|bytes_received|segs_out|segs_in):(\d+)`)

// wire returns the bytes that have passed between the ends, both ways, on the connections
// that are open now: payload of TCP, and the headers of its packets.
func (l *line) wire() (sum int64, err error) {
	out, err := exec.Command("ss", "-tinH", "state", "established", fmt.Sprintf("( sport = :%d )", l.carrier)).Output()
	if err != nil {
		return 0, fmt.Errorf("asking ss(8), of iproute2: %w", err)
	}
	found := counter.FindAllSubmatch(out, -1)
	if len(found) == 0 {
		return 0, fmt.Errorf("ss(8) counts nothing at port %d: %s", l.carrier, out)
	}
	for _, m := range found {
		n, err := strconv.ParseInt(string(m[2]), 10, 64)
		if err != nil {
			return 0, err
		}
		if m[1][0] == 's' {
			n *= headers
		}
		sum += n
	}
	return sum, nil
}
