// Package setup does what an operator asks for once: make a cloud's folder, say who may
// join it, and make a machine a node.
//
//	setup.Init(ctx, setup.InitConfig{Address: …})      // tunnel init
//	setup.InitCluster(ctx, setup.ClusterConfig{…})     // tunnel init --secret, in a pod
//	setup.CreateToken(cloud, host, node, ttl)          // tunnel token create
//	setup.Revoke(cloud, host, node, os.Stdout, notes)  // tunnel token revoke
//	setup.Join(ctx, setup.JoinConfig{Token: …})        // tunnel join, on the edge
//
// CheckTrust and ServerCertificate belong to the same way of joining, and run in the
// daemon: the first refuses certificate authorities that could sign too much, the second
// shows edges the authority that their join token pins.
//
// Each file has one owner: init.go writes the cloud's folder, init_systemd.go moves files of it for
// the unit's user, init_cluster.go writes Kubernetes' objects in its place, tokenfile.go changes the
// token file, join_files.go writes the node's folder, systemd.go writes the units and drop-ins. The package
// reads neither flags nor the environment: cmd gives both to it, and makes an exit code of
// its errors (Error).
package setup

import "tunnel.example/tunnel/conf"

// Host is what the process knows beside its command line.
type Host struct {
	Env      conf.Env
	Sudo     bool   // sudo started the process: printed commands begin with sudo, too
	Software string // how this program names itself to a cloud
}

// sudo returns the start of the commands that the operator is to run next.
func (h Host) sudo() string {
	if h.Sudo {
		return "sudo "
	}
	return ""
}

// Kind says where the cause of an error lies. cmd makes the exit code of it.
type Kind int

// The kinds of errors. An error that is no Error is of KindFailed.
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
