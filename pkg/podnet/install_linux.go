package podnet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"tunnel.example/tunnel/pkg/cni"
)

// Install copies the plugin into a folder of CNI plugins. A runtime that executes the plugin meanwhile gets either the
// old program or the new one. changed reports whether Install has replaced the program.
func Install(ctx context.Context, from, binDir string) (changed bool, err error) {
	program, err := os.ReadFile(from)
	if err != nil {
		return false, fmt.Errorf("reading the plugin: %w", err)
	}
	to := filepath.Join(binDir, cni.Program)
	old, err := os.ReadFile(to)
	if err == nil && bytes.Equal(old, program) {
		return false, os.Chmod(to, 0o755)
	}
	if err = os.MkdirAll(binDir, 0o755); err != nil {
		return false, err
	}
	aside := filepath.Join(binDir, asideOf(cni.Program))
	err = cni.WriteDurably(aside, program)
	if err == nil {
		err = os.Chmod(aside, 0o755)
	}
	if err == nil {
		err = isPlugin(ctx, aside)
	}
	if err == nil {
		err = os.Rename(aside, to)
	}
	if err != nil {
		_ = os.Remove(aside) // if the file stays, the next attempt overwrites it
		return false, fmt.Errorf("installing %s: %w", to, err)
	}
	return true, syncFolder(binDir)
}

// versionTimeout is how long a plugin may take to say its version.
const versionTimeout = 10 * time.Second

// isPlugin returns an error if a program is not a CNI plugin that runs here. It may be for another processor.
func isPlugin(ctx context.Context, program string) error {
	if _, err := versionsOf(ctx, program); err != nil {
		return fmt.Errorf("this is no CNI plugin for this machine: %w", err)
	}
	return nil
}

// versionsOf asks a plugin which versions of the CNI specification it speaks.
func versionsOf(ctx context.Context, program string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = []string{"CNI_COMMAND=VERSION"}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("asking %s for its versions: %w", program, err)
	}
	var answer struct {
		Supported []string `json:"supportedVersions"`
	}
	if err := json.Unmarshal(out, &answer); err != nil || len(answer.Supported) == 0 {
		return nil, fmt.Errorf("%s does not answer VERSION", program)
	}
	return answer.Supported, nil
}

// Uninstall removes everything that the plugin and the edge have made on this node. The network configuration names the
// bridge and the folder of reservations; dataDir is the folder if the configuration names none. Uninstall fails while
// pods have links.
func Uninstall(confDir, binDir, dataDir string) error {
	conf := used(filepath.Join(confDir, cni.ListFile), dataDir)
	if err := checkNoPods(conf.Bridge); err != nil {
		return err
	}
	// Without the network configuration, the runtime adds no pod. It may have added a pod just before, so check again.
	for _, file := range []string{cni.ListFile, asideOf(cni.ListFile), neighboursFile, asideOf(neighboursFile)} {
		if err := remove(filepath.Join(confDir, file)); err != nil {
			return err
		}
	}
	if err := checkNoPods(conf.Bridge); err != nil {
		return fmt.Errorf("the network configuration is removed, and nothing else: %w; then run the command again", err)
	}
	_, routes := linux{}.routes(nil)
	return errors.Join(
		remove(filepath.Join(binDir, cni.Program)),
		remove(filepath.Join(binDir, asideOf(cni.Program))),
		cni.RemoveReservations(conf.DataDir),
		withRights(removeTable()),
		withRights(routes),
		withRights(removeBridge(conf.Bridge)),
	)
}

// used returns the configuration in a file. For what the file does not say, it returns the defaults.
func used(file, dataDir string) *cni.Conf {
	conf := &cni.Conf{Bridge: cni.DefaultBridge, DataDir: dataDir}
	data, err := os.ReadFile(file)
	if err != nil {
		return conf
	}
	written, err := cni.ConfIn(data)
	if err != nil {
		return conf
	}
	if written.DataDir == cni.DefaultDataDir { // the file has no folder, or names the default
		written.DataDir = dataDir
	}
	return written
}

// checkNoPods returns an error if a pod has a link: a link with the alias of an attachment, on any bridge, or a veth
// pair on this bridge. A pair may lack its alias, since an alias may be too long for the kernel.
func checkNoPods(bridge string) error {
	attached, err := cni.Attached()
	if err != nil {
		return err
	}
	pairs, _, err := ports(bridge)
	if err != nil {
		return err
	}
	if pods := max(attached, pairs); pods > 0 {
		return fmt.Errorf("%d pods have links on %s: drain the node first", pods, bridge)
	}
	return nil
}

// ports counts the links on a bridge: virtual Ethernet pairs, and others.
func ports(bridge string) (pairs, others int, err error) {
	links, err := cni.Dump(netlink.LinkList)
	if err != nil {
		return 0, 0, fmt.Errorf("listing links: %w", err)
	}
	isBridge := func(l netlink.Link) bool { return l.Attrs().Name == bridge && l.Type() == "bridge" }
	i := slices.IndexFunc(links, isBridge)
	if i < 0 {
		return 0, 0, nil
	}
	for _, link := range links {
		switch {
		case link.Attrs().MasterIndex != links[i].Attrs().Index:
		case link.Type() == "veth":
			pairs++
		default:
			others++
		}
	}
	return pairs, others, nil
}

// removeBridge removes a bridge, unless the bridge has links other than pods': a network configuration may name a
// bridge that also holds the uplink.
func removeBridge(name string) error {
	_, others, err := ports(name)
	if err != nil || others > 0 {
		return err
	}
	bridge, err := netlink.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for %s: %w", name, err)
	}
	if bridge.Type() != "bridge" {
		return nil
	}
	return netlink.LinkDel(bridge)
}

// asideOf returns the name of a file that is first written, and then renamed to file.
func asideOf(file string) string { return "." + file + ".new" }

func remove(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func removeTable() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: tableName}
	c.AddTable(table) // so that there is one to delete
	c.DelTable(table)
	return c.Flush()
}
