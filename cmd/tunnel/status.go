package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newStatusCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	var all bool
	cmd := &cobra.Command{
		Use:   "status [--all]",
		Short: "Show how the cloud or the edge of this machine does",
		Long: `status asks the cloud and the edge of this machine: version, other replicas, counts, and what is wrong, as
/readyz says it. With -o wide it also shows the listeners, and what is in order. With --all it shows every replica of
the cloud; -o json and -o yaml then have one object after another, this replica's first.

Exit codes: 0 ready, 1 not ready, or a daemon or a replica does not answer.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			sockets, err := ask.sockets()
			if err != nil {
				return err
			}
			ctx, cancel := limited(cmd.Context(), askTimeout)
			defer cancel()
			var errs []error
			for _, s := range sockets {
				list, err := askStatus(ctx, s, all)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				for _, status := range list.Statuses {
					if err = printStatus(cmd.OutOrStdout(), status, &output); err != nil {
						return err
					}
					if !status.Ready {
						errs = append(errs, fmt.Errorf("the %s %s is not ready", status.Mode, cmp.Or(status.Node, status.Replica)))
					}
				}
				for _, why := range list.Incomplete {
					errs = append(errs, errors.New("the list is incomplete: "+tunnel.Printable(why)))
				}
			}
			if err := errors.Join(errs...); err != nil {
				return &exitError{exitRuntime, err}
			}
			return nil
		},
	}
	ask.register(cmd, cloudFile, edgeFile)
	output.register(cmd, "text", "wide", "json", "yaml")
	cmd.Flags().BoolVar(&all, "all", false, "show every replica of the cloud")
	return cmd
}

// askStatus asks a daemon for its status. If all is true, it asks for the status of every replica.
func askStatus(ctx context.Context, s daemonSocket, all bool) (*api.StatusList, error) {
	client := api.NewClient(s.path)
	if all {
		return client.Statuses(ctx)
	}
	status, err := client.Status(ctx)
	return &api.StatusList{Statuses: []*api.Status{status}}, err
}

// printStatus prints a status in the form of the flag.
func printStatus(w io.Writer, st *api.Status, output *outputFlag) error {
	if done, err := output.encode(w, st); done {
		return err
	}
	wide := output.form == "wide"
	who := st.Replica
	if st.Node != "" {
		who = "node " + st.Node
	}
	ready := "ready"
	if !st.Ready {
		ready = "NOT ready"
	}
	fmt.Fprintln(w, tunnel.Printable(fmt.Sprintf("%s %s (%s), up %s, %s",
		st.Mode, who, st.Software, span(st.Time.Sub(st.Started)), ready)))
	c := st.Counts
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	// The process may be another program, and some of the text comes from peers.
	row := func(name, format string, args ...any) {
		fmt.Fprintln(table, tunnel.Printable(name)+"\t"+tunnel.Printable(fmt.Sprintf(format, args...)))
	}
	if st.Mode == "cloud" {
		row("nodes", "%d connected to this replica, %d remembered", c.Nodes, c.Remembered)
	}
	row("conns", "%d open, %d wait for a limit, %d opened so far, %d reset",
		c.Conns, c.Waiting, c.Opened, c.Resets)
	row("bytes", "%s sent, %s received", size(c.SentBytes), size(c.ReceivedBytes))
	row("sessions", "%d so far, %d replaced, %d joins refused", c.Sessions, c.Replaced, c.JoinsRefused)
	for _, code := range slices.Sorted(maps.Keys(c.Refused)) {
		row("refused", "%d %s", c.Refused[code], code)
	}
	for _, s := range st.Sessions {
		row("session", "with %s (%s), %s old, round trip %s, %d conns",
			s.Remote, s.Software, span(st.Time.Sub(s.Since)), millis(s.RoundTripSeconds), s.Conns)
	}
	for _, r := range st.Replicas {
		leaving := ""
		if r.Leaving {
			leaving = ", about to stop"
		}
		row("replica", "%s (%s), %d nodes, joined %s ago%s",
			r.Remote, r.Software, r.Nodes, span(st.Time.Sub(r.Since)), leaving)
	}
	if wide {
		for _, l := range st.Listeners {
			row("listens", "%s", l)
		}
	}
	for _, check := range st.Checks {
		if wide || check.State != admin.StateOK {
			row(string(check.State), "%s %s", check.Name, check.Text)
		}
	}
	return table.Flush()
}
