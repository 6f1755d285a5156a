package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

// topFlags are the flags of tunnel top.
type topFlags struct {
	ask      askFlags
	output   outputFlag
	sort     string
	count    int
	interval time.Duration
	once     bool
}

// rate is a node with its throughput between two lists.
type rate struct {
	Node              string  `json:"node"`
	Replica           string  `json:"replica"`
	Conns             int64   `json:"conns"`
	SentPerSecond     float64 `json:"sent_bytes_per_second"`
	ReceivedPerSecond float64 `json:"received_bytes_per_second"`
	RatesUnknown      bool    `json:"rates_unknown,omitempty"` // a list lacks a session; the two rates are 0
	SentBytes         uint64  `json:"sent_bytes"`              // payload to the node by its live sessions
	ReceivedBytes     uint64  `json:"received_bytes"`
	RoundTripSeconds  float64 `json:"round_trip_seconds,omitempty"`
	Sessions          int     `json:"sessions"`
	// Of the newest session.
	Remote   string    `json:"remote,omitempty"`
	Software string    `json:"software,omitempty"`
	Since    time.Time `json:"since,omitzero"`
}

// sortKeys returns, for each value of --sort, a function that returns the number by which tunnel top sorts nodes. The
// largest number comes first.
func sortKeys() map[string]func(r *rate) float64 {
	return map[string]func(r *rate) float64{
		"rate":     func(r *rate) float64 { return r.SentPerSecond + r.ReceivedPerSecond },
		"sent":     func(r *rate) float64 { return r.SentPerSecond },
		"received": func(r *rate) float64 { return r.ReceivedPerSecond },
		"total":    func(r *rate) float64 { return float64(r.SentBytes) + float64(r.ReceivedBytes) },
		"conns":    func(r *rate) float64 { return float64(r.Conns) },
		"rtt":      func(r *rate) float64 { return r.RoundTripSeconds },
	}
}

func newTopCommand() *cobra.Command {
	var flags topFlags
	keys := slices.Sorted(maps.Keys(sortKeys()))
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the busiest nodes, again and again until Ctrl-C",
		Long: `top shows the nodes of every replica of the cloud that have the most traffic, and refreshes the list.

SENT/S and RECEIVED/S are payload bytes a second to and from the node, since the list before. They are "-" if the
replica of the node did not answer, now or then. SENT and RECEIVED are the
bytes of the live sessions. Bytes of konnectivity agents are not counted.

With --once it shows one list, and ends. With -o json each list is a line, and with -o yaml a document. -o wide adds
how many sessions a node has, and the age, address and version of the newest.

Exit codes: 0 ok, 1 no cloud answers.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.output.check(); err != nil {
				return err
			}
			if !slices.Contains(keys, flags.sort) {
				return &exitError{exitUsage, fmt.Errorf("--sort is one of %s, not %q", strings.Join(keys, ", "), flags.sort)}
			}
			if flags.count < 1 || flags.interval < 100*time.Millisecond {
				return &exitError{exitUsage, fmt.Errorf("-n is at least 1, and --interval at least 100ms")}
			}
			client, err := flags.ask.cloud()
			if err != nil {
				return err
			}
			return flags.run(cmd.Context(), client, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags.ask.register(cmd, cloudFile)
	flags.output.register(cmd, "table", "wide", "json", "yaml")
	cmd.Flags().StringVar(&flags.sort, "sort", "rate", "order: "+strings.Join(keys, ", "))
	cmd.Flags().IntVarP(&flags.count, "count", "n", 20, "how many nodes")
	cmd.Flags().DurationVar(&flags.interval, "interval", 2*time.Second, "time between two lists")
	cmd.Flags().BoolVar(&flags.once, "once", false, "show one list, and end")
	err := cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(keys, cobra.ShellCompDirectiveNoFileComp))
	if err != nil {
		panic(err) // the flag was added above
	}
	return cmd
}

// run shows lists until ctx is done.
func (t *topFlags) run(ctx context.Context, client *api.Client, w, errs io.Writer) error {
	var before *api.NodeList
	for {
		asking, cancel := limited(ctx, askTimeout)
		list, err := client.Nodes(asking)
		cancel()
		switch {
		case ctx.Err() != nil: // Ctrl-C
			return nil
		case err != nil:
			return failed(err)
		}
		if before != nil {
			if err = t.show(w, list, rates(before, list)); err != nil {
				return err
			}
			for _, why := range list.Incomplete {
				fmt.Fprintln(errs, "warning: the list is incomplete: "+tunnel.Printable(why))
			}
			if t.once {
				return nil
			}
		}
		before = list
		select {
		case <-time.After(t.interval):
		case <-ctx.Done():
			return nil
		}
	}
}

// clockDifference is how much the clocks of two replicas may differ.
const clockDifference = 2 * time.Second

// rates returns the connected nodes of a list, with their throughput since the list before. A new session counts from
// its start. If before lacks an older session, the rates of its node are unknown: a replica did not answer in time.
func rates(before, list *api.NodeList) []rate {
	seconds := max(list.Time.Sub(before.Time).Seconds(), 0.001)
	type key struct{ replica, session string }
	old := make(map[key]api.Session)
	for _, n := range before.Nodes {
		for _, s := range n.Sessions {
			old[key{s.Replica, s.ID}] = s
		}
	}
	var all []rate
	for _, n := range list.Nodes {
		if n.State != api.Connected {
			continue
		}
		newest := n.Newest()
		r := rate{
			Node: n.Name, RoundTripSeconds: newest.RoundTripSeconds, Sessions: len(n.Sessions), Remote: newest.Remote,
			Software: newest.Software, Since: newest.Since,
			RatesUnknown: len(n.Sessions) == 0, // the replica that holds the node did not answer
		}
		var replicas []string
		for _, s := range n.Sessions {
			was, known := old[key{s.Replica, s.ID}]
			if !known && s.Since.Before(before.Time.Add(-clockDifference)) {
				r.RatesUnknown = true
			}
			r.Conns += s.Conns
			r.SentBytes, r.ReceivedBytes = r.SentBytes+s.SentBytes, r.ReceivedBytes+s.ReceivedBytes
			r.SentPerSecond += float64(s.SentBytes-min(was.SentBytes, s.SentBytes)) / seconds
			r.ReceivedPerSecond += float64(s.ReceivedBytes-min(was.ReceivedBytes, s.ReceivedBytes)) / seconds
			replicas = append(replicas, s.Replica)
		}
		if r.RatesUnknown {
			r.SentPerSecond, r.ReceivedPerSecond = 0, 0
		}
		r.Replica = strings.Join(replicas, ",")
		all = append(all, r)
	}
	return all
}

// clearScreen moves the cursor of a terminal to its first line, and clears what follows.
const clearScreen = "\x1b[H\x1b[J"

// show prints the busiest nodes.
func (t *topFlags) show(w io.Writer, list *api.NodeList, all []rate) error {
	sum := rate{}
	for i := range all {
		sum.Conns += all[i].Conns
		sum.SentPerSecond += all[i].SentPerSecond
		sum.ReceivedPerSecond += all[i].ReceivedPerSecond
	}
	by := sortKeys()[t.sort]
	slices.SortStableFunc(all, func(a, b rate) int { return cmp.Compare(by(&b), by(&a)) }) // the list is sorted by name
	shown := all[:min(t.count, len(all))]
	done, err := t.output.encodeLine(w, struct {
		Time  time.Time `json:"time"`
		Nodes []rate    `json:"nodes"`
	}{list.Time, shown})
	if done {
		return err
	}
	var text strings.Builder
	if !t.once && isTerminal(w) {
		text.WriteString(clearScreen)
	}
	fmt.Fprintf(&text, "%s  %d nodes connected, %d conns, %s/s sent, %s/s received\n",
		list.Time.Local().Format("15:04:05"), len(all), sum.Conns,
		size(uint64(sum.SentPerSecond)), size(uint64(sum.ReceivedPerSecond)))
	head, wide := "NODE\tREPLICA\tCONNS\tSENT/S\tRECEIVED/S\tSENT\tRECEIVED\tRTT", t.output.form == "wide"
	if wide {
		head += "\tSESSIONS\tSINCE\tREMOTE\tVERSION"
	}
	err = printTable(&text, head, len(shown), "no nodes", func(i int) []string {
		r := &shown[i]
		sent, received := size(uint64(r.SentPerSecond)), size(uint64(r.ReceivedPerSecond))
		if r.RatesUnknown {
			sent, received = "-", "-"
		}
		cells := []string{
			r.Node, cmp.Or(r.Replica, "-"), strconv.FormatInt(r.Conns, 10), sent, received, size(r.SentBytes),
			size(r.ReceivedBytes), millis(r.RoundTripSeconds),
		}
		if wide {
			since := "-"
			if !r.Since.IsZero() {
				since = span(list.Time.Sub(r.Since))
			}
			cells = append(cells, strconv.Itoa(r.Sessions), since, cmp.Or(r.Remote, "-"), cmp.Or(r.Software, "-"))
		}
		return cells
	})
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, text.String())
	return err
}

// isTerminal reports whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) //nolint:gosec // a descriptor fits
}
