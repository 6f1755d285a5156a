package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

// pingFlags are the flags of tunnel ping.
type pingFlags struct {
	ask      askFlags
	output   outputFlag
	count    int
	interval time.Duration
}

func newPingCommand() *cobra.Command {
	var flags pingFlags
	cmd := &cobra.Command{
		Use:   "ping NODE [HOST:PORT]",
		Short: "Measure the round trip to a node, or to a target behind it",
		Long: `ping measures the round trip between the cloud and a node: a few bytes to the edge and back, by a conn like
those of callers. With HOST:PORT the edge also dials the target, if its list of permitted targets has it, and closes the
connection; nothing is sent to the target.

With -o json each ping is a line, and with -o yaml a document.

  tunnel ping edge1
  tunnel ping edge1 127.0.0.1:10250

Exit codes: 0 every ping came back, 4 the edge or the target refused, 5 the node is not connected or does not
answer, 1 no cloud answers.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return errors.New("name one node, and perhaps a target, host:port")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flags.output.check(); err != nil {
				return err
			}
			if flags.count < 0 || flags.interval < 0 {
				return &exitError{exitUsage, errors.New("--count and --interval are not negative")}
			}
			if _, err := tunnel.ParseNodeName(args[0]); err != nil {
				return &exitError{exitUsage, err}
			}
			client, err := flags.ask.cloud()
			if err != nil {
				return err
			}
			target := ""
			if len(args) == 2 {
				target = args[1]
			}
			return flags.run(cmd.Context(), client, cmd.OutOrStdout(), args[0], target)
		},
	}
	cmd.ValidArgsFunction = flags.ask.firstNode
	flags.ask.register(cmd, cloudFile)
	flags.output.register(cmd, "text", "json", "yaml")
	cmd.Flags().IntVarP(&flags.count, "count", "n", 3, "how many pings; 0: until Ctrl-C")
	cmd.Flags().DurationVar(&flags.interval, "interval", time.Second, "time between two pings")
	return cmd
}

// pingTimeout is how long a command waits for a ping. The cloud gives up before, after 15 s, and says why.
const pingTimeout = 20 * time.Second

// pingOnce pings a node, or a target behind it.
func pingOnce(ctx context.Context, client *api.Client, node, target string) (*api.Pinged, error) {
	ctx, cancel := limited(ctx, pingTimeout)
	defer cancel()
	return client.Ping(ctx, node, target)
}

// run pings until count is reached, a ping fails, or ctx is done.
func (p *pingFlags) run(ctx context.Context, client *api.Client, w io.Writer, node, target string) error {
	alone := 0.0 // seconds to open a conn to the node itself, in which the target has no part
	if target != "" {
		// An old edge or a konnectivity agent refuses this one, and may yet dial the target.
		if first, err := pingOnce(ctx, client, node, ""); err == nil {
			alone = first.OpenSeconds
		}
	}
	var trips []float64
	for n := 0; p.count == 0 || n < p.count; n++ {
		if n > 0 {
			select {
			case <-time.After(p.interval):
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			break
		}
		pinged, err := pingOnce(ctx, client, node, target)
		switch {
		case err != nil && ctx.Err() != nil: // Ctrl-C
		case err != nil:
			return failed(err)
		default:
			trips = append(trips, p.show(w, pinged, alone))
		}
	}
	if len(trips) > 1 && p.output.form == "text" {
		slices.Sort(trips)
		fmt.Fprintf(w, "%d pings: fastest %s, median %s, slowest %s\n",
			len(trips), millis(trips[0]), millis(trips[len(trips)/2]), millis(trips[len(trips)-1]))
	}
	return nil
}

// show prints a ping, and returns its duration in seconds. alone is the time to open a conn to the node itself.
func (p *pingFlags) show(w io.Writer, pinged *api.Pinged, alone float64) float64 {
	trip := pinged.EchoSeconds
	text := fmt.Sprintf("%s: round trip %s, conn opened in %s", pinged.Node, millis(trip), millis(pinged.OpenSeconds))
	switch {
	case pinged.Old:
		trip = pinged.HeartbeatSeconds
		text = fmt.Sprintf("%s: round trip %s at the last heartbeat; the node answers no pings, "+
			"since its edge is older or a konnectivity agent", pinged.Node, millis(trip))
	case pinged.Target != "":
		trip = pinged.OpenSeconds
		text = fmt.Sprintf("%s: %s opened in %s", pinged.Node, pinged.Target, millis(trip))
		if alone > 0 {
			text += fmt.Sprintf(", of which the tunnel takes some %s", millis(alone))
		}
	}
	if done, _ := p.output.encodeLine(w, pinged); !done { // its error is ignored as that of printed text
		fmt.Fprintln(w, tunnel.Printable(text))
	}
	return trip
}
