package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

// traceTimeout is how long a trace may take. The edge tries the target for at most 10 s.
const traceTimeout = 20 * time.Second

func newTraceCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "trace NODE HOST:PORT",
		Short: "Follow the way to a target behind a node: which step refuses, and why",
		Long: `trace follows the way of a conn to a target behind a node, and prints each step with its time. First it
asks which replica holds the node. The edge then tells whether it resolves the name of the target, whether its list
allow permits the target, and whether something listens there. The last line says which step refuses, and what to do
next.

The edge connects to the target and disconnects; nothing is sent to the target. An edge that is older than this command
takes all its steps at once.

  tunnel trace edge1 127.0.0.1:10250

Exit codes: 0 connected, 4 the edge or the target refused, 5 the node is not connected, or the target does not
answer, 1 no cloud answers.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return errors.New("name a node and a target, host:port")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.check(); err != nil {
				return err
			}
			_, err := tunnel.ParseNodeName(args[0])
			if err == nil {
				_, _, err = net.SplitHostPort(args[1])
			}
			if err != nil {
				return &exitError{exitUsage, err}
			}
			client, err := ask.cloud()
			if err != nil {
				return err
			}
			ctx, cancel := limited(cmd.Context(), traceTimeout)
			defer cancel()
			traced, err := client.Trace(ctx, args[0], args[1])
			if err != nil {
				return failed(err)
			}
			if err = printTrace(cmd.OutOrStdout(), traced, &output); err != nil {
				return err
			}
			last := traced.Hops[len(traced.Hops)-1]
			if last.Code == "" {
				return nil
			}
			return failed(&api.Failure{
				Code: last.Code, Text: fmt.Sprintf("%s cannot be reached through %s: %s", args[1], args[0], last.Code),
			})
		},
		ValidArgsFunction: ask.firstNode,
	}
	ask.register(cmd, cloudFile)
	output.register(cmd, "text", "json", "yaml")
	return cmd
}

// printTrace prints a trace in the form of the flag.
func printTrace(w io.Writer, traced *api.Traced, output *outputFlag) error {
	if len(traced.Hops) == 0 {
		return &exitError{exitRuntime, errors.New("the cloud has answered with no step")}
	}
	if done, err := output.encode(w, traced); done {
		return err
	}
	for i, hop := range traced.Hops {
		what, took := "", ""
		if hop.Code != "" {
			what = "FAILED (" + hop.Code + "): "
		}
		if hop.Seconds > 0 {
			took = " (" + millis(hop.Seconds) + ")"
		}
		line := tunnel.Printable(fmt.Sprintf("%s: %s%s%s", hop.At, what, hop.Text, took))
		if _, err := fmt.Fprintf(w, "%d  %s\n", i+1, line); err != nil {
			return err
		}
		if hop.Next != "" {
			fmt.Fprintf(w, "   next: %s\n", tunnel.Printable(hop.Next))
		}
	}
	return nil
}
