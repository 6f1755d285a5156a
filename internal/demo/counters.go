package demo

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// count prints the cloud's counters until ctx is done or a write fails; then it closes the
// channel. A terminal gets a line each second, other readers get a line for each change.
func (d *demo) count(ctx context.Context) <-chan struct{} {
	done := make(chan struct{})
	terminal := isTerminal(d.out)
	_, err := fmt.Fprintln(d.out, "\nlive counters of the cloud; Ctrl-C ends the demo")
	go func() {
		defer close(done)
		var last string
		for err == nil {
			if line := d.counters(ctx); line != "" && (terminal || line != last) {
				last = line
				if terminal {
					_, err = fmt.Fprintf(d.out, "\r\x1b[K%s", line)
				} else {
					_, err = fmt.Fprintln(d.out, line)
				}
			}
			select {
			case <-ctx.Done():
				fmt.Fprintln(d.out, "\nstopping; nothing is left behind")
				return
			case <-time.After(time.Second):
			}
		}
	}()
	return done
}

func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// counters returns a line made of the cloud's /metrics, or "" if the cloud does not answer.
func (d *demo) counters(ctx context.Context) string {
	text, err := get(ctx, http.DefaultClient, fmt.Sprintf("http://127.0.0.1:%d/metrics", d.log))
	if err != nil {
		return ""
	}
	values := make(map[string]float64)
	for line := range strings.SplitSeq(text, "\n") {
		name, value, ok := strings.Cut(line, " ")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		name, _, _ = strings.Cut(name, "{") // sums up the refusals of all codes
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			values[name] += v
		}
	}
	return fmt.Sprintf("nodes %.0f   conns %.0f now, %.0f opened, %.0f refused   %s to the edge, %s from it",
		values["tunnel_sessions"], values["tunnel_conns"], values["tunnel_conns_opened_total"],
		values["tunnel_conns_refused_total"],
		size(values["tunnel_sent_bytes_total"]), size(values["tunnel_received_bytes_total"]))
}

// size writes a number of bytes with a unit.
func size(n float64) string {
	for _, unit := range []string{"B", "kB", "MB", "GB"} {
		if n < 1000 {
			return strconv.FormatFloat(n, 'g', 3, 64) + " " + unit
		}
		n /= 1000
	}
	return strconv.FormatFloat(n, 'g', 3, 64) + " TB"
}
