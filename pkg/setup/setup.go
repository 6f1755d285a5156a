// Package setup does what an operator asks for once: make a cloud's folder, say who may
// join it, and make a machine a node.
//
//	setup.Init(ctx, setup.InitConfig{Address: …})      // tunnel init
//	setup.InitCluster(ctx, setup.ClusterConfig{…})     // tunnel init --secret, in a pod
//	setup.CreateToken(cloud, host, node, ttl)          // tunnel token create
//	setup.Revoke(cloud, host, node, os.Stdout, notes)  // tunnel token revoke
//	setup.Join(ctx, setup.JoinConfig{Token: …})        // tunnel join, on the edge
//
// CheckTrust and ServerCertificate run in the cloud, for edges that join by a join token. CheckTrust refuses
// certificate authorities that could sign more than they are for. ServerCertificate shows edges the authority that
// their join token pins.
//
// Each file of this package writes one thing:
//
//   - init.go: the cloud's folder
//   - init_systemd.go: the private files of a cloud that systemd runs, outside of the cloud's folder
//   - init_cluster.go: objects of Kubernetes in place of the cloud's folder
//   - tokenfile.go: the token file
//   - join_files.go: the node's folder
//   - systemd.go: units and drop-ins
//
// The package reads neither flags nor the environment: cmd passes both, and turns errors (Error) into exit codes.
package setup

import "tunnel.example/tunnel/conf"

// Host is what setup needs to know of the machine and of the program that runs.
type Host struct {
	Env      conf.Env
	Sudo     bool   // sudo started the process, so printed commands begin with sudo, too
	Software string // the name and version of this program, which a cloud logs and shows
}

// sudo returns "sudo " if printed commands need it, else "".
func (h Host) sudo() string {
	if h.Sudo {
		return "sudo "
	}
	return ""
}

// Kind says where the cause of an error lies. cmd chooses the exit code by the Kind.
type Kind int

// The kinds of errors. An error that is not of type *Error counts as KindFailed.
const (
	KindFailed  Kind = iota // a step failed while it ran
	KindUsage               // the command line is wrong
	KindConfig              // the configuration is wrong
	KindRefused             // the cloud refused
)

// Error is an error with a kind.
type Error struct {
	Kind Kind
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

func configError(err error) error { return &Error{KindConfig, err} }
