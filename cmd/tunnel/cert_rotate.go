package main

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newCertRotateCommand() *cobra.Command {
	var ask askFlags
	var caKey string
	var status, force bool
	cmd := &cobra.Command{
		Use:   "rotate-ca",
		Short: "Replace the CAs of a cloud, step by step, while nodes stay connected",
		Long: `rotate-ca does the next of three steps, and says what comes next:

  1  make new CAs; edges take the new CA of the cloud with their next certificates
  2  when every node trusts the new CA: the new CAs sign, and the cloud gets a new key and certificate
  3  when no node has a certificate of the old CA: remove the old CAs

A step that was interrupted may be run again. rotate-ca refuses a step while nodes are missing for it. With
--status it changes nothing, and says which nodes are missing. The key of the cloud's CA must be on this machine:
--ca-key names its file. With several replicas, copy the files that each step names. docs/certificates.md says more.

Exit codes: 0 done; 1 failed; 3 the configuration has no CA to replace; 5 nodes or replicas are not ready.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := ask.config.path()
			if err != nil {
				return err
			}
			c, err := conf.LoadCloud(path, elsewhere())
			if err != nil {
				return configError(err)
			}
			cfg := setup.RotateConfig{
				Cloud: c, CAKey: caKey, Force: force, Out: cmd.OutOrStdout(),
				Look: func(ctx context.Context) (*setup.RotationView, error) { return rotationView(ctx, &ask) },
				Renew: func(ctx context.Context) error {
					client, failed := ask.cloud()
					if failed != nil {
						return failed
					}
					ctx, cancel := limited(ctx, askTimeout)
					defer cancel()
					answer, failed := client.Renew(ctx, nil)
					if failed == nil && len(answer.Incomplete) > 0 {
						failed = errors.New("not every replica has asked its nodes: " +
							tunnel.Printable(strings.Join(answer.Incomplete, "; ")))
					}
					return failed
				},
			}
			do := setup.RotateCA
			if status {
				do = setup.RotationStatus
			}
			err = do(cmd.Context(), cfg)
			if errors.Is(err, setup.ErrNotReady) {
				return &exitError{exitAway, err}
			}
			return setupError(err)
		},
	}
	ask.register(cmd, cloudFile)
	f := cmd.Flags()
	f.StringVar(&caKey, "ca-key", "", "`file` with the key of the cloud's CA; else ca.key beside cloudca")
	f.BoolVar(&status, "status", false, "change nothing; say which step comes next, and what is missing for it")
	f.BoolVar(&force, "force", false, "do the next step even if nodes are missing: they must join again")
	return cmd
}

// rotationView asks the cloud which CAs and certificates its replicas and nodes have.
func rotationView(ctx context.Context, ask *askFlags) (*setup.RotationView, error) {
	client, err := ask.cloud()
	if err != nil {
		return nil, err
	}
	ctx, cancel := limited(ctx, askTimeout)
	defer cancel()
	list, err := client.Certificates(ctx)
	if err != nil {
		return nil, err
	}
	ids := func(cas []api.Certificate) (all []string) {
		for _, c := range cas {
			all = append(all, c.ID)
		}
		return all
	}
	view := &setup.RotationView{Without: list.Without, Incomplete: list.Incomplete}
	for _, p := range list.Processes {
		r := setup.RotationReplica{Name: p.Replica, CloudCAs: ids(p.CloudCAs), NodeCAs: ids(p.NodeCAs), Signer: p.Signer}
		if p.Own != nil {
			r.OwnBy = p.Own.Signer
		}
		view.Replicas = append(view.Replicas, r)
	}
	for _, n := range list.Nodes {
		if n.Ends.After(list.Time) { // a node whose certificate has expired must join again anyway
			view.Nodes = append(view.Nodes, setup.RotationNode{
				Name: n.Node, Trusts: n.Trusts, Signer: n.Signer,
			})
		}
	}
	return view, nil
}
