package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newLsCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	var missing bool
	cmd := &cobra.Command{
		Use:   "ls [NODE...]",
		Short: "List the nodes of a cloud: connected, and missing",
		Long: `ls lists the nodes of every replica of the cloud. A node is missing if it has no session with any replica,
and was connected before, or Kubernetes has a Node of its name.

SINCE is the age of the newest session, or the time since a missing node was last seen. SENT and RECEIVED are
payload bytes of live sessions, as the cloud sees them. ENDS is when the node's certificate ends.

Run it on the machine of the cloud, as root or as the user of the cloud.

Exit codes: 0 ok, 1 the list is incomplete or no cloud answers, 5 a node that was asked for is missing.`,
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := output.check(); err != nil {
				return err
			}
			client, err := ask.cloud()
			if err != nil {
				return err
			}
			ctx, cancel := limited(cmd.Context(), askTimeout)
			defer cancel()
			list, err := client.Nodes(ctx)
			if err != nil {
				return failed(err)
			}
			unknown := choose(list, names, missing)
			if err = printNodes(cmd.OutOrStdout(), list, &output); err != nil {
				return err
			}
			for _, why := range list.Incomplete {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning: the list is incomplete: "+tunnel.Printable(why))
			}
			return verdict(list, names, unknown, missing)
		},
		ValidArgsFunction: ask.nodeNames,
	}
	ask.register(cmd, cloudFile)
	output.register(cmd, "table", "wide", "json", "yaml")
	cmd.Flags().BoolVar(&missing, "missing", false, "list missing nodes only")
	return cmd
}

// choose removes from the list every node that was not asked for. It returns the names that nobody knows.
func choose(list *api.NodeList, names []string, missing bool) (unknown []string) {
	for _, name := range names {
		if !slices.ContainsFunc(list.Nodes, func(n api.Node) bool { return n.Name == name }) {
			unknown = append(unknown, name)
		}
	}
	list.Nodes = slices.DeleteFunc(list.Nodes, func(n api.Node) bool {
		return missing && n.State != api.Missing || len(names) > 0 && !slices.Contains(names, n.Name)
	})
	return unknown
}

// verdict returns the error that chooses the exit code for a printed list.
func verdict(list *api.NodeList, names, unknown []string, missing bool) error {
	away := slices.ContainsFunc(list.Nodes, func(n api.Node) bool { return n.State == api.Missing })
	switch {
	case len(list.Incomplete) > 0:
		return &exitError{exitRuntime, errors.New("the list is incomplete")}
	case len(unknown) > 0:
		return &exitError{exitAway, fmt.Errorf("no replica knows the node %s", strings.Join(unknown, ", "))}
	case away && (missing || len(names) > 0):
		return &exitError{exitAway, errors.New("missing nodes: " + strconv.Itoa(count(list, api.Missing)))}
	}
	return nil
}

// count returns how many nodes of the list are in a state.
func count(list *api.NodeList, state api.NodeState) (n int) {
	for i := range list.Nodes {
		if list.Nodes[i].State == state {
			n++
		}
	}
	return n
}

// printNodes prints the list in the form of the flag.
func printNodes(w io.Writer, list *api.NodeList, output *outputFlag) error {
	if done, err := output.encode(w, list); done {
		return err
	}
	wide := output.form == "wide"
	head := "NAME\tSTATE\tSINCE\tREPLICA\tREMOTE\tRTT\tCONNS\tSENT\tRECEIVED\tVERSION\tENDS"
	if wide {
		head += "\tKIND\tSESSIONS\tISSUED\tFIRST SEEN\tLAST END"
	}
	err := printTable(w, head, len(list.Nodes), "no nodes", func(i int) []string {
		return cells(&list.Nodes[i], list.Time, wide)
	})
	if err != nil || len(list.Nodes) == 0 {
		return err
	}
	_, err = fmt.Fprintf(w, "%d connected, %d missing\n", count(list, api.Connected), count(list, api.Missing))
	return err
}

// cells returns the line of a node. now is the cloud's clock.
func cells(n *api.Node, now time.Time, wide bool) []string {
	since := func(t time.Time, never string) string {
		if t.IsZero() {
			return never
		}
		return span(now.Sub(t))
	}
	ends := "-"
	if !n.CertificateEnds.IsZero() {
		ends = span(n.CertificateEnds.Sub(now))
	}
	s := n.Newest()
	kind, line := "-", []string{n.Name, string(n.State)}
	if n.State == api.Missing {
		line = append(line, since(n.LastSeen, "never"), cmp.Or(n.LastReplica, "-"), cmp.Or(n.LastRemote, "-"),
			"-", "-", "-", "-", cmp.Or(n.LastSoftware, "-"), ends)
	} else {
		conns, sent, received, replicas := int64(0), uint64(0), uint64(0), []string(nil)
		for _, one := range n.Sessions {
			conns, sent, received = conns+one.Conns, sent+one.SentBytes, received+one.ReceivedBytes
			replicas = append(replicas, one.Replica)
		}
		kind = cmp.Or(s.Kind, "-")
		line = append(line, since(s.Since, "-"), cmp.Or(strings.Join(replicas, ","), "-"), cmp.Or(s.Remote, "-"),
			millis(s.RoundTripSeconds), strconv.FormatInt(conns, 10), size(sent), size(received),
			cmp.Or(s.Software, "-"), ends)
	}
	if wide {
		line = append(line, kind, strconv.Itoa(n.SessionsTotal), strconv.Itoa(n.CertificatesIssued),
			since(n.FirstSeen, "-"), cmp.Or(n.LastEnd, "-"))
	}
	return line
}

func newForgetCommand() *cobra.Command {
	var ask askFlags
	cmd := &cobra.Command{
		Use:   "forget NODE...",
		Short: "Remove nodes that are gone for good from the list of missing nodes",
		Long: `forget removes missing nodes from the inventories of all replicas, so that ls no longer lists them. It revokes
nothing: with its certificate the node may connect again (see tunnel token revoke). A node that Kubernetes has
stays in the list.

Exit codes: 0 forgotten; 1 no inventory has the node, the node is connected, or no cloud answers; 2 wrong command
line.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("name the nodes to forget")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, names []string) error {
			client, err := ask.cloud()
			if err != nil {
				return err
			}
			ctx, cancel := limited(cmd.Context(), askTimeout)
			defer cancel()
			var errs []error
			for _, name := range names {
				had, err := client.Forget(ctx, name)
				switch {
				case err != nil:
					errs = append(errs, err)
				case had:
					fmt.Fprintf(cmd.OutOrStdout(), "forgot %s\n", name)
				default:
					errs = append(errs, fmt.Errorf("no inventory has the node %s", name))
				}
			}
			if err := errors.Join(errs...); err != nil {
				return &exitError{exitRuntime, err}
			}
			return nil
		},
		ValidArgsFunction: ask.nodeNames,
	}
	ask.register(cmd, cloudFile)
	return cmd
}
